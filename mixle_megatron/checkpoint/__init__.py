"""Writing, judging and reading checkpoints in Megatron's dist-checkpoint format."""
