"""The pretraining run: its ranks, its loop, and what it shows and leaves behind."""
