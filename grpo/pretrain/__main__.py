"""`python -m grpo.pretrain`: see `grpo.pretrain.train`."""

from grpo.pretrain.train import parse, train

if __name__ == "__main__":
    train(parse())
