"""The training loop, one step at a time: the embedded model learns to interleave three words.

python examples/loop_by_hand.py
"""

from grpo import Model, make_trainer


def longest(report):
    """Add a metric: the length of the step's longest completion in characters."""
    texts = [text for group in report.groups for text in group.texts]
    report.metrics["longest"] = max(map(len, texts))


def main():
    """Make at most 30 steps, and end as soon as the mean score passes 0.95."""
    trainer = make_trainer(task="interleave", level=3, prompts=8, callbacks=[longest])
    for _ in range(30):
        report = trainer.step()
        metrics = report.metrics
        varied = metrics["groups/class/varied"]
        print(
            f"step {report.step:2}  score {metrics['value']:.3f}  {varied} groups vary  "
            f"longest {metrics['longest']}"
        )
        if metrics["value"] > 0.95:
            break

    _, problem = trainer.problems(trainer.done + 1)[0]  # the next one, which is new to the policy
    print("asked ", problem.prompt)
    print("wanted", problem.target)
    print("wrote ", *Model(trainer.policy).generate([problem.prompt], temperature=0))


if __name__ == "__main__":
    main()
