"""RMSNorms, and the residual adds before them."""
