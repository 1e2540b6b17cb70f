#!/usr/bin/env bash
# tiny-gpt (dp_shard=2 · tp=4) on 2 node(s) of 4 GPUs.
# Submit it with sbatch, from the folder that relative paths of the config start from.
#SBATCH --job-name=tiny-gpt
#SBATCH --partition=gpu
#SBATCH --account=team
#SBATCH --time=8:00:00
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
# Slurm may queue the job again: when a node fails, and when this script asks for it.
#SBATCH --requeue
# The ranks, and not this script, are told to stop before the time limit: they write a checkpoint.
#SBATCH --signal=TERM@300
set -euo pipefail
: "${SLURM_JOB_ID:?submit this file with sbatch}"

# This job's folder, which all nodes have to see: the config as it was printed, and one log a node.
folder="$PWD/jobs/$SLURM_JOB_NAME-$SLURM_JOB_ID"
mkdir -p "$folder"
cat >"$folder/config.yaml" <<'CONFIG'
run:
  name: tiny-gpt
  dir: runs
  seed: 1234
  steps: 200
plan:
  dp_replicate: 1
  dp_shard: 2
  tp: 4
  pp: 1
  cp: 1
  ep: 1
  etp: 1
  gradient_accumulation_steps: 1
model:
  family: gpt
  num_layers: 4
  hidden_size: 128
  num_attention_heads: 4
  seq_length: 128
  vocab_size: 257
precision: bf16
batch:
  global_batch_size: 16
  micro_batch_size: 4
optimizer:
  name: adam
  lr: 0.003
  weight_decay: 0.1
  clip_grad: 1.0
  schedule: cosine
  warmup_steps: 20
data:
  source: text
  paths:
  - stdlib
  tokenizer: byte
checkpoint:
  every: 100
  keep: 2
evaluation:
  every: 50
  batches: 8
CONFIG

# The ranks meet at the first host, on a port that follows from the job, below those that Linux hands out.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${hosts%%$'\n'*}
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT

# Without it every rank starts as many threads as its node has cores.
export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"
# Kernels start in the order of their launch, so that communication overlaps computation (before Blackwell).
export CUDA_DEVICE_MAX_CONNECTIONS=1

# Modules and environments read variables that nobody has set.
set +u
module load cuda
set -u

# Consecutive ranks share a node (block). A rank that ends with 3 must not take down those that
# still write (kill-on-bad-exit); what is left 300 s after the first end waits for one that is lost.
# srun ends with the highest exit code of its ranks.
code=0
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" \
  --distribution=block \
  --kill-on-bad-exit=0 --wait=300 \
  --output="$folder/%n-%N.log" --open-mode=append \
  mixle-megatron pretrain "$folder/config.yaml" || code=$?

# 3: the ranks were stopped and wrote a checkpoint. Queue the job again, to go on from it.
if [[ $code -eq 3 ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
