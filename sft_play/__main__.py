"""`python -m sft_play`."""

from sft_play.cli import main

main()
