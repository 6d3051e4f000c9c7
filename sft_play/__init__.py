"""SFT-Play: supervised fine-tuning, from a YAML file to a checked adapter."""

__version__ = "0.1.0"
