"""``python -m mixle_megatron`` is the command ``mixle-megatron``."""

from mixle_megatron.cli.main import main

if __name__ == "__main__":
    main()
