"""Breaks the core on purpose, one snippet at a time, and runs the tests that ought to notice. `tests/mutation.sh` starts it.

A mutant is killed when a test fails (pytest's exit status 1), and survives when all pass. Anything else is broken and counts for nothing:
a mutant that cannot be imported, or whose tests come to no end, says nothing about the tests. All is done in copies of the tree.
"""
import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

HOUSE = Path(__file__).resolve().parents[1]
LIMIT = 600  # seconds that the tests of one mutant may take
PYTEST = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--hypothesis-profile=mutation"]
# No byte code: of a source that changed twice within a second and kept its size, the old one would be taken.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


class Mutant(NamedTuple):
    """In `file` the snippet `old`, which stands there exactly once, becomes `new`; one of the `tests` (files, spaces between) ought to fail."""

    name: str
    file: str
    tests: str
    old: str
    new: str


# (file, its tests): (name, old, new) of each mutant. Paths of tests are below tests/.
TABLE = {
    ("grpo/learn/advantages.py", "grpo/test_advantages.py"): [
        ("deviation with divisor n", "import mean, stdev", "import mean, pstdev as stdev")],
    ("grpo/learn/loss.py", "grpo/test_loss.py"): [
        ("clip bounds change sides", "clamp(1 - clip_low, 1 + clip_high)", "clamp(1 - clip_high, 1 + clip_low)"),
        ("sign of the loss", "loss_RT = -torch.minimum", "loss_RT = torch.minimum"),
        ("KL dropped from the loss", "beta * _log_ratio", "0 * _log_ratio"),
        ("KL the other way round", "difference_RT = ref_RT - logp_RT", "difference_RT = logp_RT - ref_RT"),
        ("cispo's ratio keeps its gradient", "-clipped_RT.detach()", "-clipped_RT"),
        ("mask multiplied", "torch.where(mask_RT, x_RT, 0.0)", "x_RT * mask_RT"),
        ("importance weighs the KL as well", '.exp() * terms["kl"]', '.exp() * terms["kl"] * (1 if importance_RT is None else importance_RT)'),
        ("the KL's gradient the other way round", "mask_RT).exp() * terms", "mask_RT).exp().detach() * terms")],
    ("grpo/learn/logprobs.py", "grpo/test_logprobs.py"): [
        ("temperature ignored", "logits_nV.to(like).div_(temperature_n[:, None])", "logits_nV.to(like)"),
        ("gradient ignores the temperature", "(d_n / temperature_n)[:, None]", "d_n[:, None]"),
        ("temperature ignored where logits are computed again", ".to(d_n.dtype).div_(temperature_n[:, None])", ".to(d_n.dtype)"),
        ("probabilities kept whatever their size", "N * V * like.itemsize <= KEPT", "True"),
        ("the head's gradient is the last chunk's", "d_weight_VH.addmm_(d_logits_nV.t(), hidden_nH)", "d_weight_VH = d_logits_nV.t() @ hidden_nH"),
        ("one chunk's part of the bias's gradient", "d_bias_V += d_logits_nV.sum(0)", "d_bias_V = d_logits_nV.sum(0)"),
        ("entropy keeps its gradient", "all_nV.detach().exp()", "all_nV.exp()")],
    ("grpo/learn/update.py", "grpo/test_update.py"): [
        ("gradients of the step before stay", "optimizer.clear()", "pass"),
        ("truncation not seen by the loss", "[places_M // T], truncate=truncate", "[places_M // T]"),
        ("temperature of the first row", "batch.temperatures_R[places_M // T]", "batch.temperatures_R[0 * places_M]"),
        ("the host waits for each micro-batch", "seen.append((batch, loss.detach()", "seen.append((batch, torch.tensor(loss.item())"),
        ("reference is the policy", "completion_logprobs(reference, batch", "completion_logprobs(policy, batch"),
        ("first pass remembered with its gradient", "batch, logp_RT.detach())\n", "batch, logp_RT)\n"),
        ("importance not truncated", ".clamp(max=importance_limit)", "")],
    ("grpo/learn/batch.py", "grpo/test_batch.py"): [
        ("loss normalised over the micro-batch", "[weight for _, _, weight, _ in rows]", "[1 / int(mask.sum()) for _ in rows]"),
        ("every rank learns from all", "return [parts[number] for number in sorted(mine)]", "return parts")],
    ("grpo/learn/optimizer.py", "test_ranks.py"): [
        ("gradients of other ranks left out", "self.ranks.add(gradients)", "pass")],
    ("grpo/learn/optimizer.py", "grpo/test_optimizer.py"): [
        ("gradients added up in bfloat16", "weight.grad.to(_wide(weight))", "weight.grad.clone()"),
        ("weights stay behind their masters", "self.inner.step()\n        self._publish()", "self.inner.step()"),
        ("masters not saved", 'state.setdefault(number, {})["master"] = master.detach()', "pass"),
        ("norm of one rank's part", "self.ranks.add([square])", "pass"),
        ("gradients not clipped", "if max_norm:", "if False:")],
    ("grpo/memory.py", "grpo/test_memory.py"): [
        ("values of the cache forgotten", "return 2 * self.layers * self.keys", "return self.layers * self.keys"),
        ("activations and caches may take more than there is", "min(CACHES * left, BUSY * shape.activations)", "BUSY * shape.activations"),
        ("sums shared out as well", "parts + 4 * trained", "parts + 4 * trained // parts")],
    ("grpo/rollout/engine.py", "grpo/test_memory.py"): [
        ("every lot at the first one's temperatures", "keys[some], temperatures[some]", "keys[some], temperatures[:lot]")],
    ("grpo/plan.py", "grpo/test_plan.py"): [
        ("every GPU has all prompts", "mine = model.shape, -(-work.prompts // gpus)", "mine = model.shape, work.prompts"),
        ("masters forgotten", '"optimizer": optimizer - gradients', '"optimizer": optimizer - 2 * gradients')],
    ("grpo/ranks.py", "test_ranks.py"): [
        ("every rank samples everything", "items[self.rank::self.size]", "items")],
    ("grpo/learn/packing.py", "grpo/test_packing.py"): [
        ("log-sum-exps joined by the larger", "torch.logaddexp(one_lse, other_lse)", "torch.maximum(one_lse, other_lse)"),
        ("completion sees its own future", "Segments(after, after, True", "Segments(after, after, False"),
        ("first token predicted by its neighbour", "[ends[r // rows] - 1]", "[ends[r // rows] - 2]"),
        ("no gradient to the prompt's keys", "[on_key + other_key, own_key]", "[on_key, own_key]"),
        ("padding of the prompts is seen", ">= segments.key_lengths[:, None]", "> segments.key_lengths[:, None]"),
        ("positions begin anew behind the prompt", "torch.arange(before[r // rows], before[r // rows] + after[r])", "torch.arange(after[r])")],
    ("grpo/learn/joined.py", "grpo/test_lean.py"): [
        ("adapter's scale ignored", "second.data, scaling))", "second.data, 1.0))")],
    ("grpo/learn/precision.py", "grpo/test_lean.py::test_float32_products_by_onednn"): [
        ("bias forgotten by the faster product", 'weight_XK, bias_X, "none"', 'weight_XK, None, "none"')],
    ("grpo/rollout/captured.py", "grpo/test_engine.py::test_the_library_of_products_is_chosen_for_a_while_and_in_silence"): [
        ("library of products not put back", "preferred_blas_library(before)", "preferred_blas_library()")],
    ("grpo/learn/operations.py", "grpo/test_lean.py"): [
        ("sign within the norm's gradient", "scale_M1**3 / -N", "scale_M1**3 / N"),
        ("residual's gradient dropped", "d_sum.add_(d_total)", "d_sum")],
    ("grpo/learn/credit.py", "grpo/test_credit.py"): [
        ("baseline of the group, not of the state", "(reward - means[state])", "(reward - mean(group.rewards))"),
        ("word written as soon as its letters are", "bisect_left(word_ends, reached, lo", "bisect_left(word_ends, reached + 1, lo")],
    ("grpo/rollout/sampling.py", "grpo/test_sampling.py"): [
        ("counters added, not hashed", '"/".join(map(str, counters))', "str(sum(counters))"),
        ("inverse CDF from the wrong side", "passed_N1 - before_N1, right=True", "passed_N1 - before_N1, right=False")],
    ("grpo/rollout/drafting.py", "grpo/test_drafting.py::test_plans_by_hand"): [
        ("drafts aimed a token too far", "written[:, None] + torch.arange(k)]", "written[:, None] + 1 + torch.arange(k)]"),
        ("end of the text not drafted", "[*plan, *self.end]", "plan")],
    ("grpo/rollout/eager.py", "grpo/test_engine.py::test_what_counts_of_a_draft_by_hand "
                              "grpo/test_drafting.py::test_drafted_is_undrafted_token_for_token[qwen3-0.15-False] "
                              "grpo/test_engine.py::test_completions_that_agree_so_far_are_one_row"): [
        ("one drafted token too many accepted", "return 1 + goes_on", "return 2 + goes_on"),
        ("tokens behind a wrong one accepted", "goes_on.long().cumprod(1)", "goes_on.long()"),
        ("text goes on behind its end", "& ~torch.isin(chosen_CT[:, :-1], stops)", ""),
        ("numbers repeated within a draft", "+ torch.arange(hidden.shape[1])", "+ 0 * torch.arange(hidden.shape[1])"),
        ("budget exceeded by one", "self.budget - self.written)\n        self.last", "self.budget - self.written + 1)\n        self.last"),
        ("rows with other tokens not parted", "[self.row, self.written, self.last]", "[self.row, self.written, self.written]")],
    ("grpo/rollout/cache.py", "grpo/test_engine.py::test_sampler_logprobs_are_those_of_a_plain_forward "
                              "grpo/test_engine.py::test_rows_may_stand_in_any_order "
                              "grpo/test_engine.py::test_long_rows_attend_as_short_ones_do "
                              "grpo/test_engine.py::test_what_is_sampled_does_not_depend_on_company "
                              "grpo/test_drafting.py::test_drafted_is_undrafted_token_for_token[qwen3-0.15-False]"): [
        ("token does not see itself", "> places_RT[:, :, None]", ">= places_RT[:, :, None]"),
        ("prompt's padding is seen", "device=lengths_P.device) >= lengths_P", "device=lengths_P.device) > lengths_P"),
        ("moved rows keep the old keys", "buffer[rows_R[moved_N], :", "buffer[moved_N, :"),
        ("places of the step before", "self.filled_R, self.next = filled_R, None", "self.filled_R = filled_R"),
        ("long rows see the prompt's padding", "self.padding_PL[self.prompt_R, None]", "(0 * self.padding_PL[self.prompt_R, None]).bool()"),
        ("long rows all read one prompt", "shared[self.prompt_R], own], 2)", "shared[0 * self.prompt_R], own], 2)"),
        ("long rows by the mask of the step before", "            self.mask_R1MX = None\n", ""),
        ("rows in any seats", "self.has_one_each = torch.equal(", "self.has_one_each = self.width == 1 or torch.equal(")],
    ("grpo/policy.py", "grpo/test_engine.py::test_other_families_sample_from_their_own_distribution[gpt2]"): [
        ("policy in training mode", "model.eval(), tokenizer", "model.train(), tokenizer")],
    ("grpo/policy.py", "grpo/test_policy.py"): [
        ("reference keeps the adapter", "self.lean.is_adapted = False", "self.lean.is_adapted = True"),
        ("adapter stays off behind the reference", "finally:\n                    self.lean.is_adapted = True", "finally:\n                    pass")],
    ("grpo/load.py", "grpo/test_policy.py"): [
        ("cuDNN's attention is asked", "enable_cudnn_sdp(False)", "enable_cudnn_sdp(True)"),
        ("reference shares the policy's weights", "copy.deepcopy(model) if weights", "copy.copy(model) if weights")],
    ("grpo/variance.py", "grpo/test_variance.py"): [
        ("solved counts as collapsed", '= ("identical", "failed", "tied")', '= ("identical", "failed", "tied", "solved")'),
        ("equal rewards vary", "max(rewards) - min(rewards) > threshold", "max(rewards) - min(rewards) >= threshold"),
        ("heat only above the trigger", "collapsed >= self.trigger", "collapsed > self.trigger"),
        ("kept tokens are the wasted ones", 'if group.action != "keep")', 'if group.action == "keep")'),
        ("half a group is no common trap", "2 * traps[name] >= len(scores)", "2 * traps[name] > len(scores)"),
        ("later tries counted", "Counter(group.verdict for group in groups if group.attempt == 0)", "Counter(group.verdict for group in groups)")],
    ("grpo/curriculum.py", "grpo/test_curriculum.py"): [
        ("back to a rung without a budget", "and not self._is_spent(self.rung - 1)", ""),
        ("scores of the old rung kept", "self.values.clear()", "pass"),
        ("seed and step added", "levels/{seed}/{step}", "levels/{seed + step}")],
    ("grpo/spread.py", "grpo/test_variance.py"): [
        ("a bin without its upper bound", "from bisect import bisect_left", "from bisect import bisect_right as bisect_left")],
    ("grpo/trainer.py", "grpo/test_trainer.py"): [
        ("tries share their numbers", "index, sample, attempt) for sample", "index, sample, 0) for sample"),
        ("skipped groups learned from", '[group for group in groups if group.action == "keep"]', "list(groups)"),
        ("last problem drawn again", "problems[-1][0] + 1", "problems[-1][0]")],
    ("grpo/evaluate.py", "grpo/test_config.py"): [
        ("interval of 90 %", "[0.025, 0.975]", "[0.05, 0.95]")],
    ("grpo/store/checkpoint.py", "grpo/test_checkpoint.py"): [
        ("renamed before it is on the disk", "            sync(path)\n", "            pass\n"),
        ("checksums not compared", '_sha256(file) != fact["sha256"]', "False"),
        ("first checkpoint deleted", "keep = {valid[0], *valid[-2:]", "keep = {*valid[-2:]"),
        ("step gone back to deleted", "step_of(path) > step]", "step_of(path) >= step]")],
    ("grpo/store/rollouts.py", "grpo/test_store_logs.py"): [
        ("reward stored as the advantage", '"advantage": advantage,', '"advantage": score.reward,')],
    ("tasks/supply.py", "tasks/test_supply.py"): [
        ("what was trained on is held out", "if problem.key in seen", "if False")],
    ("tasks/base.py", "tasks/test_base.py"): [
        ("seed and index added", "/{seed}/{split}/{level}/{index}", "/{seed + index}/{split}/{level}"),
        ("split not in the hash", "/{seed}/{split}/{level}/{index}", "/{seed}/{level}/{index}")],
    ("tasks/arithmetic.py", "tasks/test_arithmetic.py"): [
        ("problems of any split", "if split_of_key(problem.key) == split:", "if True:")],
    ("tasks/answers.py", "tasks/test_answers.py"): [
        ("first marker counts", "in pattern.finditer(text):\n        pass", "in pattern.finditer(text):\n        break"),
        ("minus sign of typesetters dropped", 'in ("-", "−") else', 'in ("-",) else')],
    ("tasks/interleave.py", "tasks/test_interleave.py"): [
        ("balance is the smaller share", "min(share_a, share_b) / max(share_a, share_b, 1e-9)", "min(share_a, share_b)"),
        ("credits of a text that runs on", "value / max(i, len(target), 1)", "value / max(len(target), 1)")],
    ("tasks/trap_names.py", "tasks/test_trap_names.py"): [
        ("B leads the other way", "[B_LEADS][:lead == 1]", "[B_LEADS][:lead == -1]"),
        ("a slip changes the strategy", "LEAST = 3", "LEAST = 0")],
    ("align/needleman.py", "align/test_needleman.py"): [
        ("gap opened at every symbol", "pair + opening, delete, insert + opening", "pair + opening, delete + opening, insert + opening"),
        ("ties broken the other way", "(delete < top).view", "(delete <= top).view"),
        ("cells that overflow", "np.min_scalar_type(floor - bound)", "np.dtype(np.int8)")],
    ("align/bitparallel.py", "align/test_needleman.py"): [
        ("carries run into the neighbour", "(len(first) + 1 for first in firsts)", "(len(first) for first in firsts)")],
    ("align/prefixes.py", "align/test_prefixes.py"): [
        ("end of the target not open", "row_BM.max(axis=1)", "row_BM[:, -1]")],
    ("align/words.py", "align/test_words.py"): [
        ("ends counted in the normalised text", "for match in _WORD.finditer(text)", "for match in _WORD.finditer(normalise(text))")],
}
MUTANTS = [Mutant(name, file, " ".join(f"tests/{path}" for path in tests.split()), old, new)
           for (file, tests), rows in TABLE.items() for name, old, new in rows]


def mutated(mutant: Mutant, text: str) -> str:
    """Return the text of the mutant's file with its snippet replaced. Raises ValueError unless that stands there exactly once."""
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file}, '{mutant.name}': found {text.count(mutant.old)} times, and not once: {mutant.old}")
    return text.replace(mutant.old, mutant.new)


def outcome(folder: Path, tests: str) -> str:
    """Return what the tests in `folder` say: "killed", "survived", or "broken" and why."""
    try:
        done = subprocess.run([*PYTEST, *tests.split()], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return f"broken: no end within {LIMIT} seconds"
    last = "".join((done.stdout + done.stderr).strip().splitlines()[-1:])
    return {0: "survived", 1: "killed"}.get(done.returncode, f"broken: pytest ended with {done.returncode}: {last}")


def try_out(folders: SimpleQueue, mutant: Mutant) -> tuple[str, float]:
    """Return the outcome of a mutant, in a folder that is free, and how many seconds it took."""
    folder, start = folders.get(), time.monotonic()
    file = folder / mutant.file
    text = file.read_text()
    file.write_text(mutated(mutant, text))
    result = outcome(folder, mutant.tests)
    file.write_text(text)
    folders.put(folder)
    return result, time.monotonic() - start


def copied_tree(folder: Path) -> Path:
    """Copy the files that git knows, as they are now, into `folder`. Raises ValueError where Python would import modules from elsewhere."""
    for name in subprocess.run(["git", "ls-files", "-z"], cwd=HOUSE, check=True, capture_output=True, text=True).stdout.split("\0"):
        if (HOUSE / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(HOUSE / name, folder / name)
    asked = [sys.executable, "-c", "import grpo; print(grpo.__file__)"]
    found = subprocess.run(asked, cwd=folder, env=ENVIRONMENT, check=True, capture_output=True, text=True).stdout.strip()
    if Path(found).resolve() != (folder / "grpo/__init__.py").resolve():
        raise ValueError(f"the tests would import {found} and not the copy in {folder}")
    return folder


def main() -> int:
    """Return 1 if a mutant survived or broke."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only mutants with one of these in their file or name")
    parser.add_argument("--jobs", type=int, default=2)
    options, start = parser.parse_args(), time.monotonic()
    chosen = [mutant for mutant in MUTANTS if not options.words or any(word in f"{mutant.file}: {mutant.name}" for word in options.words)]
    if not chosen:
        parser.error(f"no mutant has one of these in its file or name: {' '.join(options.words)}")
    for mutant in chosen:
        mutated(mutant, (HOUSE / mutant.file).read_text())  # names a stale snippet before anything runs
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:
        folders: SimpleQueue = SimpleQueue()
        for number in range(options.jobs):
            folders.put(copied_tree(Path(scratch) / str(number)))
        tests = list(dict.fromkeys(path for mutant in chosen for path in mutant.tests.split()))
        parts = [" ".join(tests[number::options.jobs]) for number in range(options.jobs) if tests[number:]]
        true = [Mutant("", chosen[0].file, part, chosen[0].old, chosen[0].old) for part in parts]
        for part, (result, _) in zip(parts, list(pool.map(partial(try_out, folders), true))):
            if result != "survived":
                sys.exit(f"{result} without a mutant: {part}")
        print(f"the tests pass as they are ({time.monotonic() - start:.0f} s)", flush=True)
        results = []
        for mutant, (result, seconds) in zip(chosen, pool.map(partial(try_out, folders), chosen)):
            print(f"{result:<8} {seconds:4.0f} s  {mutant.file}: {mutant.name}", flush=True)
            results.append(result)
    killed, survived = results.count("killed"), results.count("survived")
    print(f"{len(chosen)} mutants: {killed} killed, {survived} survived, {len(chosen) - killed - survived} broken, "
          f"in {(time.monotonic() - start) / 60:.1f} minutes")
    for mutant, result in zip(chosen, results):
        if result != "killed":
            print(f"{result}: {mutant.file}: {mutant.name} ({mutant.tests})")
    return int(killed < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
