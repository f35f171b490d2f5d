"""`python -m data.make`: see `data.make.train`."""

from data.make.train import parse, train

if __name__ == "__main__":
    train(parse())
