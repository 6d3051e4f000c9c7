import logging

# Imported by peft, it warns on every CPU of a kernel for inference that is not used here; this package comes before peft.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
