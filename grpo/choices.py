"""The values that some settings may take, by name.

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
WAYS = ("auto", "off", "imitation", "demonstrations")
