"""Training on fewer bytes and fewer passes: fused functions that compute what PEFT's and transformers' modules compute."""
