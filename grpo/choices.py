"""The values that some settings may take.

They stand apart from the code that implements them, because `--help` must not wait for torch.
"""

LOSSES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo")
OPTIMIZERS = ("adamw", "adamw8bit")
LORA_VARIANTS = ("lora", "rslora", "dora")
QUANTISED = ("none", "int8", "nf4")
CONTROLS = ("none", "shuffled-rewards", "constant-reward")
PREFLIGHTS = ("on", "off", "only")
PROMOTIONS = ("running", "heldout")
SCHEDULES = ("constant", "cosine")
SOURCES = ("base", "start", "dataset", "corpus", "config", "task")  # what a run depends on
TRACKERS = ("tensorboard", "wandb", "trackio")
WAYS = ("auto", "off", "imitation")
MOST_DRAFTED = 127  # tokens


def is_draft_mode(mode: str) -> bool:
    """Return whether `mode` is a value of the setting `draft`: auto, off, or a number of tokens."""
    return mode in ("auto", "off") or (mode.isdecimal() and int(mode) <= MOST_DRAFTED)


# Examples before a question. More would fill any context, and each is searched for.
MOST_SHOTS = 64
