"""The YAML config: its schema (pydantic) and how it is loaded (OmegaConf).

Nothing here imports torch, and importing this package alone imports nothing at all: use
``mixle_megatron.config.schema`` and ``mixle_megatron.config.load``.
"""
