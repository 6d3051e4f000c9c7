"""`python -m sft_play`."""

from sft_play.cli import main_of_process

main_of_process()
