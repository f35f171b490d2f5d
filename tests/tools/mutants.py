"""The mutants of `run_mutants.py`: one deliberate fault each, beside the tests that should notice.

The file is long because it is a table: one entry for each fault.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    """One change to one file. `tests` (paths separated by spaces) should fail once it is made.

    `where` is the qualified name of the function or class that holds the code ("" for the whole
    module). `old` and `new` are source code: two expressions or two statements. Code is compared
    by syntax tree, so neither its layout nor its comments matter.
    """

    name: str
    file: str
    tests: str
    where: str
    old: str
    new: str


# (file, its tests): (name, where, old, new) of each mutant. Test paths are relative to tests/.
TABLE = {
    ("tests/benchmarks/learning_records.py", "test_bench_learning.py"): [
        (
            "one lucky evaluation counts",
            "kept",
            "min(here[2], after[2])",
            "here[2]",
        ),
        (
            "one seed of several is enough",
            "Arm.highest",
            "min(map(highest, self.runs))",
            "max(map(highest, self.runs))",
        ),
        (
            "a killed run counts as whole",
            "read_record",
            'not lines or "end" not in lines[-1]',
            "not lines",
        ),
    ],
    ("grpo/learn/advantages.py", "grpo/test_advantages.py"): [
        (
            "deviation with divisor n",
            "",
            "from statistics import mean, stdev",
            "from statistics import mean, pstdev as stdev",
        ),
        ("means of integers are integers", "floats", "float(reward)", "reward"),
    ],
    ("grpo/learn/loss.py", "grpo/test_loss.py"): [
        (
            "clip bounds change sides",
            "policy_loss",
            "ratio_RT.clamp(1 - clip_low, 1 + clip_high)",
            "ratio_RT.clamp(1 - clip_high, 1 + clip_low)",
        ),
        (
            "sign of the loss",
            "policy_loss",
            "-torch.minimum(ratio_RT * advantages_RT, clipped_RT * advantages_RT)",
            "torch.minimum(ratio_RT * advantages_RT, clipped_RT * advantages_RT)",
        ),
        (
            "KL dropped from the loss",
            "step_loss",
            "settings.beta * _log_ratio(inputs).exp()",
            "0 * _log_ratio(inputs).exp()",
        ),
        ("KL the other way round", "kl_k3", "ref_RT - logp_RT", "logp_RT - ref_RT"),
        ("cispo's ratio keeps its gradient", "policy_loss", "clipped_RT.detach()", "clipped_RT"),
        ("mask multiplied", "zero_padding", "torch.where(mask_RT, x_RT, 0.0)", "x_RT * mask_RT"),
        (
            "importance weighs the KL as well",
            "step_loss",
            "settings.beta * _log_ratio(inputs).exp() * terms['kl']",
            "settings.beta * _log_ratio(inputs).exp() * terms['kl'] * (1 if inputs.importance_RT "
            "is None else inputs.importance_RT)",
        ),
        (
            "the KL's gradient the other way round",
            "step_loss",
            "_log_ratio(inputs).exp",
            "_log_ratio(inputs).exp().detach",
        ),
    ],
    ("grpo/learn/own_loss.py", "grpo/test_own_loss.py"): [
        (
            "padding reaches a user's loss",
            "_without_padding",
            "zero_padding(inputs.old_RT, mask_RT)",
            "inputs.old_RT",
        ),
        (
            "padding of a user's loss reaches the gradient",
            "_CheckedTerm.backward",
            "zero_padding(d_logp_RT, inputs.mask_RT)",
            "d_logp_RT",
        ),
        (
            "the gradient of a user's loss is not checked",
            "_CheckedTerm.backward",
            "own.check_finite(d_logp_RT, inputs, 'its gradient')",
            "None",
        ),
        (
            "an unnamed loss file is executed",
            "require_trusted_loss",
            "spec not in allowed",
            "False",
        ),
    ],
    ("grpo/training/truncation.py", "grpo/test_truncation.py"): [
        (
            "the penalty begins at once",
            "soft_penalty",
            "max(length - (budget - tokens), 0)",
            "max(length, 0)",
        ),
        (
            "the penalty is a reward",
            "add_soft_penalty",
            "score.reward + penalty",
            "score.reward - penalty",
        ),
    ],
    ("grpo/trainer.py", "grpo/test_truncation.py"): [
        (
            "a step of truncated completions is learned from",
            "Trainer.update_policy",
            "all(completion.is_truncated for group in kept for completion in group.completions)",
            "False",
        ),
    ],
    ("grpo/learn/batch.py", "grpo/test_truncation.py"): [
        (
            "truncated completions stay",
            "_rows",
            "masks_truncated and completion.is_truncated",
            "False",
        ),
        (
            "truncated completions stay in the denominator",
            "_rows",
            "[len(completion.tokens) for rows in kept for _, completion in rows]",
            "[len(completion.tokens) for group in groups for completion in group.completions]",
        ),
    ],
    ("tasks/reward_calls.py", "tasks/test_rewards.py"): [
        (
            "the watcher is not told of the end",
            "Progress.__exit__",
            "self._tell(len(self.calls))",
            "None",
        ),
    ],
    ("tasks/reward_process.py", "tasks/test_rewards.py"): [
        ("a process outlives ours", "_read", "os._exit(0)", "None"),
        ("prints reach the pipe", "main", "os.dup2(2, 1)", "None"),
        (
            "a process is started for each call",
            "RewardProcess.begin",
            "self._process is not None",
            "False",
        ),
    ],
    ("grpo/curriculum/difficulty.py", "grpo/test_difficulty.py"): [
        ("the limits are left out", "outcome_of", "score <= high", "score < high"),
        ("samples of the pre-flight", "", "SEED = 3_000_029", "SEED = 3_000_003"),
    ],
    ("grpo/run/difficulty.py", "grpo/test_difficulty.py"): [
        (
            "a resumed run measures again",
            "filter_by_difficulty",
            "_measure(run, limits) if is_new else run.ranks.on_rank0(lambda: _stored(run, folder))",
            "_measure(run, limits)",
        ),
        (
            "nothing is left out",
            "filter_by_difficulty",
            "{each.key for each in found if each.outcome == 'kept'}",
            "{each.key for each in found}",
        ),
    ],
    ("grpo/run/session.py", "grpo/test_difficulty.py"): [
        (
            "the first prompt is drawn before problems are left out",
            "Run.begin",
            "filter_by_difficulty(self.context, self.folder, "
            "is_new=self.opened.checkpoint is None)",
            "None",
        ),
    ],
    ("grpo/learn/enumeration.py", "grpo/test_own_loss.py"): [
        ("any gradient passes", "_check_policy_gradient", "error <= TOLERANCE", "True"),
        ("any cut passes", "_check_micro_batches", "error <= TOLERANCE", "True"),
    ],
    ("grpo/learn/logprobs.py", "grpo/test_logprobs.py"): [
        (
            "temperature ignored",
            "_LinearLogprobs.forward",
            "logits_nV.to(dtype).div_(temperature_n[:, None])",
            "logits_nV.to(dtype)",
        ),
        (
            "gradient ignores the temperature",
            "_LinearLogprobs.backward",
            "d_n / temperature_n",
            "d_n",
        ),
        (
            "temperature ignored where logits are computed again",
            "_LinearLogprobs.backward",
            "logits_nV.div_(temperature_n[:, None]).softmax(-1)",
            "logits_nV.softmax(-1)",
        ),
        (
            "probabilities kept whatever their size",
            "_LinearLogprobs.forward",
            "N * V * dtype.itemsize <= KEPT",
            "True",
        ),
        (
            "the head's gradient is the last chunk's",
            "_LinearLogprobs.backward",
            "d_weight_VE.addmm_(d_logits_nV.t(), hidden_nE)",
            "d_weight_VE = d_logits_nV.t() @ hidden_nE",
        ),
        (
            "one chunk's part of the bias's gradient",
            "_LinearLogprobs.backward",
            "d_bias_V += d_logits_nV.sum(0)",
            "d_bias_V = d_logits_nV.sum(0)",
        ),
        ("entropy keeps its gradient", "_chunk_logprobs", "all_nV.detach()", "all_nV"),
    ],
    ("grpo/learn/update.py", "grpo/test_bad_numbers.py"): [
        (
            "weights not looked at after the step",
            "update",
            "check_step(named_tensors(policy, optimizer), ranks)",
            "pass",
        ),
    ],
    ("grpo/learn/optimizer.py", "grpo/test_bad_numbers.py"): [
        (
            "moments not looked at after the step",
            "Optimizer.tensors",
            "found[number, name] = value",
            "pass",
        ),
    ],
    ("grpo/model/finite.py", "grpo/test_bad_numbers.py"): [
        (
            "each rank judges by its own numbers",
            "check_step",
            "ranks.all_reduce([norm])",
            "pass",
        ),
    ],
    ("grpo/learn/update.py", "grpo/test_update.py"): [
        ("gradients of the step before stay", "update", "optimizer.clear()", "pass"),
        (
            "truncation not seen by the loss",
            "completion_logprobs",
            "token_logprobs(hidden_ME, policy.head, batch.tokens_RT.take(places_M), "
            "batch.temperatures_R[places_M // T], truncate=truncate)",
            "token_logprobs(hidden_ME, policy.head, batch.tokens_RT.take(places_M), "
            "batch.temperatures_R[places_M // T])",
        ),
        ("temperature of the first row", "completion_logprobs", "places_M // T", "0 * places_M"),
        (
            "the host waits for each micro-batch",
            "_backward",
            "loss.detach()",
            "torch.tensor(loss.item())",
        ),
        (
            "reference is the policy",
            "_backward",
            "completion_logprobs(reference, batch, settings.truncate, packing)",
            "completion_logprobs(policy, batch, settings.truncate, packing)",
        ),
        (
            "first pass remembered with its gradient",
            "_backward",
            "_first_pass(before, batch, logp_RT.detach())",
            "_first_pass(before, batch, logp_RT)",
        ),
        (
            "importance not truncated",
            "_backward",
            "(old_RT - batch.old_RT).exp().clamp(max=settings.importance_limit)",
            "(old_RT - batch.old_RT).exp()",
        ),
    ],
    ("grpo/learn/batch.py", "grpo/test_batch.py"): [
        (
            "loss normalised over the micro-batch",
            "_tensors",
            "[row.weight for row in rows]",
            "[1 / int(mask_RT.sum()) for _ in rows]",
        ),
        (
            "every rank learns from all",
            "_assign",
            "[parts[number] for number in sorted(local)]",
            "parts",
        ),
    ],
    ("grpo/learn/optimizer.py", "test_ranks.py"): [
        (
            "gradients of other ranks left out",
            "Optimizer.collect",
            "self.ranks.all_reduce(gradients)",
            "pass",
        ),
    ],
    ("grpo/learn/optimizer.py", "grpo/test_optimizer.py"): [
        (
            "gradients added up in bfloat16",
            "Optimizer._sum",
            "weight.grad.to(_wide(weight))",
            "weight.grad.clone()",
        ),
        ("weights stay behind their masters", "Optimizer.step", "self._publish()", "pass"),
        (
            "masters not saved",
            "Optimizer.state_dict",
            "state.setdefault(number, {})['master'] = master.detach()",
            "pass",
        ),
        ("norm of one rank's part", "Optimizer.collect", "self.ranks.all_reduce([square])", "pass"),
        (
            "gradients not clipped",
            "Optimizer.collect",
            "if max_norm:\n    torch.nn.utils.clip_grads_with_norm_(self.masters, max_norm, norm)",
            "if False:\n    torch.nn.utils.clip_grads_with_norm_(self.masters, max_norm, norm)",
        ),
    ],
    ("grpo/model/memory.py", "grpo/test_memory.py"): [
        ("values of the cache forgotten", "Shape.cache", "2 * self.layers", "self.layers"),
        (
            "activations and caches may take more than there is",
            "update_tokens",
            "min(CACHE_SHARE * left, BUSY_TOKENS * shape.activations)",
            "BUSY_TOKENS * shape.activations",
        ),
        (
            "sums shared out as well",
            "optimizer_bytes",
            "masters + MOMENT_BYTES[kind] * trained // parts + sums",
            "masters + MOMENT_BYTES[kind] * trained // parts + sums // parts",
        ),
    ],
    ("grpo/rollout/generate.py", "grpo/test_memory.py"): [
        (
            "every batch at the first one's temperatures",
            "PromptSettings.of",
            "self.temperatures[prompts]",
            "self.temperatures[: prompts.stop - prompts.start]",
        ),
    ],
    ("grpo/tools/estimate.py", "grpo/test_plan.py"): [
        ("every GPU has all prompts", "forecast", "-(-work.prompts // gpus)", "work.prompts"),
        ("masters forgotten", "forecast", "optimizer - gradients", "optimizer - 2 * gradients"),
    ],
    ("grpo/distributed.py", "test_ranks.py"): [
        ("every rank samples everything", "Ranks.share", "items[self.rank::self.size]", "items"),
    ],
    ("grpo/model/varlen_attention.py", "grpo/test_packing.py"): [
        (
            "flash kernel told of one query",
            "_flash",
            "max(segments.max_queries, LEAST_QUERIES)",
            "segments.max_queries",
        ),
        ("log-sum-exps merged by the larger", "merge_lse", "torch.logaddexp", "torch.maximum"),
        (
            "padding of the prompts is seen",
            "_padding_mask",
            "torch.arange(segments.max_keys, device=like.device) >= segments.key_lengths[:, None]",
            "torch.arange(segments.max_keys, device=like.device) > segments.key_lengths[:, None]",
        ),
    ],
    ("grpo/model/packed_attention.py", "grpo/test_packing.py"): [
        (
            "completion sees its own future",
            "Packing.__init__",
            "VarlenSegments(read_lengths, read_lengths, True, device)",
            "VarlenSegments(read_lengths, read_lengths, False, device)",
        ),
        (
            "first token predicted by its neighbour",
            "Packing.__init__",
            "prompt_ends[r // rows] - 1",
            "prompt_ends[r // rows] - 2",
        ),
        (
            "no gradient to the prompt's keys",
            "_SharedPrefixAttention.backward",
            "d_key + on_key",
            "d_key",
        ),
        (
            "positions begin anew behind the prompt",
            "Packing.__init__",
            "torch.arange(prompt_length, length)",
            "torch.arange(length - prompt_length)",
        ),
    ],
    ("grpo/model/merged_linear.py", "grpo/test_lean.py"): [
        (
            "adapter's scale ignored",
            "MergedLinear.copies",
            "WeightCopy(lora_b, adapter.b.data, adapter.scaling)",
            "WeightCopy(lora_b, adapter.b.data, 1.0)",
        ),
    ],
    (
        "grpo/model/check.py",
        "grpo/test_model_check.py::test_the_path_does_not_depend_on_how_far_an_adapter_was_trained "
        "grpo/test_model_check.py::test_a_new_adapter_hides_no_mistake_in_how_it_is_merged",
    ): [
        ("new adapters compared as they are", "_probe_adapters", "ADAPTER_STD", "0.0"),
        (
            "adapters left as the comparison made them",
            "_probe_adapters",
            "zip(adapters, kept)",
            "()",
        ),
    ],
    ("grpo/model/matmul.py", "grpo/test_lean.py::test_float32_products_by_onednn"): [
        (
            "bias forgotten by the faster product",
            "linear_no_grad",
            "torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, bias_O, 'none', [], '')",
            "torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, None, 'none', [], '')",
        ),
    ],
    (
        "grpo/rollout/cuda_graph.py",
        "grpo/test_engine.py::test_the_library_of_products_is_chosen_for_a_while_and_in_silence",
    ): [
        (
            "library of products not put back",
            "light_products",
            "torch.backends.cuda.preferred_blas_library(before)",
            "torch.backends.cuda.preferred_blas_library()",
        ),
    ],
    ("grpo/model/ops.py", "grpo/test_lean.py"): [
        ("sign within the norm's gradient", "_AddNorm.backward", "-E", "E"),
        ("residual's gradient dropped", "_AddNorm.backward", "d_sum.add_(d_total)", "d_sum"),
    ],
    ("grpo/learn/credit.py", "grpo/test_credit.py"): [
        (
            "baseline of the group, not of the state",
            "token_advantages",
            "means[state]",
            "mean(group_rewards)",
        ),
        (
            "word written as soon as its letters are",
            "token_states",
            "bisect_left(word_ends, reached, lo=1)",
            "bisect_left(word_ends, reached + 1, lo=1)",
        ),
    ],
    ("grpo/rollout/sampling.py", "grpo/test_sampling.py"): [
        (
            "counters added, not hashed",
            "sample_key",
            "'/'.join(map(str, counters))",
            "str(sum(counters))",
        ),
        (
            "inverse CDF from the wrong side",
            "draw",
            "torch.searchsorted(cdf_Nb, passed_N1 - before_N1, right=True)",
            "torch.searchsorted(cdf_Nb, passed_N1 - before_N1, right=False)",
        ),
        (
            "nucleus of the whole distribution behind top-k",
            "truncation.truncate",
            "kept_RV.sort(-1)",
            "logits_RV.sort(-1)",
        ),
    ],
    ("grpo/rollout/speculative.py", "grpo/test_drafting.py::test_plans_by_hand"): [
        (
            "drafts aimed a token too far",
            "DraftPlans.offer",
            "written[:, None]",
            "written[:, None] + 1",
        ),
        ("end of the text not drafted", "DraftPlans._plan", "[*plan, *self.end]", "plan"),
    ],
    (
        "grpo/rollout/eager_decoder.py",
        "grpo/test_engine.py::test_what_counts_of_a_draft_by_hand "
        "grpo/test_drafting.py::test_drafted_is_undrafted_token_for_token[qwen3-0.15-False] "
        "grpo/test_engine.py::test_completions_that_agree_so_far_are_one_row",
    ): [
        (
            "one drafted token too many accepted",
            "accepted",
            "1 + goes_on.long().cumprod(1).sum(1)",
            "2 + goes_on.long().cumprod(1).sum(1)",
        ),
        (
            "tokens behind a wrong one accepted",
            "accepted",
            "goes_on.long().cumprod(1)",
            "goes_on.long()",
        ),
        (
            "text goes on behind its end",
            "accepted",
            "(chosen_CT[:, :-1] == drafts_Ck) & ~torch.isin(chosen_CT[:, :-1], stops)",
            "chosen_CT[:, :-1] == drafts_Ck",
        ),
        (
            "numbers repeated within a draft",
            "EagerDecoder.step",
            "torch.arange(hidden_RTE.shape[1])",
            "0 * torch.arange(hidden_RTE.shape[1])",
        ),
        (
            "budget exceeded by one",
            "EagerDecoder.step",
            "self.budget - self.written",
            "self.budget - self.written + 1",
        ),
        (
            "rows with other tokens not split",
            "EagerDecoder._split_rows",
            "torch.stack([self.row, self.written, self.last])",
            "torch.stack([self.row, self.written, self.written])",
        ),
    ],
    (
        "grpo/model/prefix_cache.py",
        "grpo/test_engine.py::test_sampler_logprobs_are_those_of_a_plain_forward "
        "grpo/test_engine.py::test_rows_may_stand_in_any_order "
        "grpo/test_engine.py::test_long_rows_attend_as_short_ones_do "
        "grpo/test_engine.py::test_what_is_sampled_does_not_depend_on_company "
        "grpo/test_drafting.py::test_drafted_is_undrafted_token_for_token[qwen3-0.15-False]",
    ): [
        (
            "token does not see itself",
            "PrefixCache._next",
            "places_S > places_RT[:, :, None]",
            "places_S >= places_RT[:, :, None]",
        ),
        (
            "prompt's padding is seen",
            "PrefixCache.__init__",
            "torch.arange(padded_length, device=lengths_P.device) >= lengths_P[:, None]",
            "torch.arange(padded_length, device=lengths_P.device) > lengths_P[:, None]",
        ),
        ("moved rows keep the old keys", "PrefixCache._reordered", "rows_R[moved_A]", "moved_A"),
        (
            "places of the step before",
            "PrefixCache.reorder",
            "self.next = None",
            "pass",
        ),
        (
            "long rows see the prompt's padding",
            "PrefixCache._attend_long",
            "self.padding_PL[self.prompt_R, None]",
            "(0 * self.padding_PL[self.prompt_R, None]).bool()",
        ),
        (
            "long rows all read one prompt",
            "PrefixCache._of_each_row",
            "prompts_PKLD[self.prompt_R]",
            "prompts_PKLD[0 * self.prompt_R]",
        ),
        (
            "long rows by the mask of the step before",
            "PrefixCache._next",
            "self.mask_R1ZX = None",
            "pass",
        ),
        (
            "rows in any slots",
            "PrefixCache._assign_slots",
            "torch.equal(prompt_R, prompts_P)",
            "W == 1 or torch.equal(prompt_R, prompts_P)",
        ),
    ],
    (
        "grpo/model/policy.py",
        "grpo/test_engine.py::test_other_families_sample_from_their_own_distribution[gpt2]",
    ): [
        ("policy in training mode", "Policy.__init__", "model.eval", "model.train"),
    ],
    ("grpo/model/policy.py", "grpo/test_policy.py"): [
        (
            "reference keeps the adapter",
            "Policy.reference",
            "self.fast_model.use_lora = False",
            "self.fast_model.use_lora = True",
        ),
        (
            "adapter stays off behind the reference",
            "Policy.reference",
            "self.fast_model.use_lora = True",
            "pass",
        ),
    ],
    ("grpo/model/policy.py", "grpo/test_encoding.py"): [
        (
            "control tokens unseen",
            "Policy.decode",
            "self.tokenizer.decode(written, skip_special_tokens=False)",
            "self.tokenizer.decode(written, skip_special_tokens=True)",
        ),
    ],
    ("grpo/model/encoding.py", "grpo/test_encoding.py"): [
        (
            "texts of control tokens not looked for",
            "prompt_tokens",
            "{name for said in texts for name in pattern.findall(said)} if pattern else set()",
            "set()",
        ),
        (
            "control tokens in the chat template's variables",
            "prompt_tokens",
            "[said for _, said in turns] + _strings_in(arguments)",
            "[said for _, said in turns]",
        ),
        (
            "control tokens in targets",
            "plain_tokens",
            "tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True)",
            "tokenizer(list(texts), add_special_tokens=False)",
        ),
    ],
    ("grpo/model/prompts.py", "grpo/test_prompts.py"): [
        (
            "a turn that is left out passes",
            "_try",
            "said not in text",
            "False",
        ),
        (
            "examples after the question",
            "PromptFormat.turns",
            "(*system, *shown, *question)",
            "(*system, *question, *shown)",
        ),
    ],
    ("grpo/model/check.py", "grpo/test_model_check.py"): [
        (
            "update is not compared",
            "_difference",
            "torch.tensor([in_rollout, in_update]).max()",
            "torch.tensor([in_rollout, in_update])[0]",
        ),
    ],
    ("grpo/model/distance.py", "grpo/test_model_check.py"): [
        ("rounding excuses float32", "tolerance", "FLOAT32_TOLERANCE", "1e3"),
    ],
    ("grpo/model/load.py", "grpo/test_weights.py"): [
        ("missing weights pass", "_load_model", "info['missing_keys']", "()"),
    ],
    ("grpo/model/adapter.py", "grpo/test_weights.py"): [
        ("adapter's missing tensors pass", "load_adapter", "expected - found", "()"),
    ],
    ("grpo/model/load.py", "grpo/test_policy.py"): [
        (
            "cuDNN's attention is asked",
            "_configure_libraries",
            "torch.backends.cuda.enable_cudnn_sdp(False)",
            "torch.backends.cuda.enable_cudnn_sdp(True)",
        ),
        (
            "reference shares the policy's weights",
            "load_policy",
            "copy.deepcopy(model) if is_new else _load_model(resolve(spec), device, torch_dtype)",
            "copy.copy(model) if is_new else _load_model(resolve(spec), device, torch_dtype)",
        ),
    ],
    ("grpo/model/load.py", "test_start.py"): [
        (
            "the reference is the base, not the start",
            "load_policy",
            "load_adapter(copy.deepcopy(model), files.start_adapter)",
            "copy.deepcopy(model)",
        ),
    ],
    ("grpo/model/policy.py", "grpo/test_endings.py"): [
        (
            "the chat template's end token ends nothing",
            "_stop_ids",
            "sorted(declared | shown)",
            "sorted(declared)",
        ),
    ],
    ("grpo/training/problems.py", "test_start.py"): [
        (
            "what an earlier run trained on may be evaluated",
            "ProblemStream.begin_after",
            'dict.fromkeys(state["seen"])',
            "{}",
        ),
    ],
    ("grpo/variance.py", "grpo/test_variance.py tasks/test_scores.py"): [
        (
            "solved counts as collapsed",
            "",
            "('identical', 'failed', 'tied')",
            "('identical', 'failed', 'tied', 'solved')",
        ),
        (
            "equal rewards vary",
            "classify",
            "max(rewards) - min(rewards) > threshold",
            "max(rewards) - min(rewards) >= threshold",
        ),
        (
            "solved by another task's range",
            "classify",
            "reward_range or (-math.inf, math.inf)",
            "(0.0, 1.0)",
        ),
        (
            "temperature raised only above the trigger",
            "VarianceMonitor._adjust_temperature",
            "lost >= settings.trigger",
            "lost > settings.trigger",
        ),
        (
            "failing groups raise the temperature",
            "lost_diversity",
            "distinct <= max(1, DIVERSITY * len(group.texts))",
            "True",
        ),
        (
            "an alarm is raised once only",
            "VarianceMonitor._is_due",
            "periods.bit_count() == 1",
            "periods == 1",
        ),
        (
            "one alarm hides all others",
            "VarianceMonitor._watch_classes",
            "self._is_due(cause)",
            "self._is_due('any')",
        ),
        (
            "kept tokens are the wasted ones",
            "_wasted",
            "group.action != 'keep'",
            "group.action == 'keep'",
        ),
        (
            "half a group is no common trap",
            "common_trap",
            "2 * traps[name] >= len(scores)",
            "2 * traps[name] > len(scores)",
        ),
        (
            "later tries counted",
            "VarianceMonitor.observe",
            "first_tries(groups)",
            "list(groups)",
        ),
    ],
    ("tasks/scoring.py", "tasks/test_scores.py"): [
        (
            "rewards outside the range",
            "_within",
            "abs(number - nearest) > ROUNDING * (high - low)",
            "False",
        ),
    ],
    ("grpo/verdict.py", "grpo/test_verdict.py"): [
        ("a mean above zero is enough", "reach_verdict", "low > 0", "high > 0"),
        (
            "kept groups count as trained",
            "Progress.observe",
            "group.class_name == 'varied'",
            "True",
        ),
        (
            "different problems are compared",
            "reach_verdict",
            "[after[key] - start[key] for key in shared]",
            "[x - y for x, y in zip(after.values(), before.values())]",
        ),
    ],
    ("grpo/run/sources.py", "test_resume.py"): [
        ("changed sources accepted unasked", "check", "set(found) <= set(accept)", "True"),
    ],
    ("grpo/run/sources.py", "grpo/test_sources.py"): [
        ("one page of each tensor", "_places", "(last - start) * i // (PAGES - 1)", "0"),
    ],
    ("grpo/run/dependencies.py", "test_resume.py"): [
        (
            "settings taken from config.yaml as they are",
            "Dependencies._compare",
            "self.sources | {'config': settings_now}",
            "self.sources",
        ),
    ],
    ("data/streams.py", "test_lost_console.py::test_a_lost_console_does_not_lose_the_run"): [
        (
            "what is buffered is written when the interpreter ends",
            "Lasting._attempt",
            "self._point_to_nothing()",
            "pass",
        ),
    ],
    ("grpo/run/interrupt.py", "test_lost_console.py::test_under_nohup_a_hangup_is_nothing"): [
        (
            "a hangup counts under nohup",
            "Interrupt.__enter__",
            "HANGUP and signal.getsignal(HANGUP) != signal.SIG_IGN",
            "HANGUP",
        ),
    ],
    ("grpo/curriculum/ladder.py", "grpo/test_curriculum.py"): [
        (
            "back to a level without a budget",
            "Ladder._must_step_back",
            "self.position > 0 and self.collapsed >= self._patience(self.position) and (not "
            "self._is_spent(self.position - 1))",
            "self.position > 0 and self.collapsed >= self._patience(self.position)",
        ),
        ("scores of the old level kept", "Ladder._move", "self.recent.clear()", "pass"),
        (
            "a lucky mean promotes",
            "reaches_mark",
            "mean >= mark and low >= mark - MARGIN",
            "mean >= mark",
        ),
        (
            "steps back ask for nothing more",
            "Ladder._patience",
            "self.settings.collapse_steps * 2 ** self.steps_back[position]",
            "self.settings.collapse_steps",
        ),
        (
            "seed and step added",
            "level_draws",
            "f'levels/{seed}/{step}{later}'",
            "f'levels/{seed + step}{later}'",
        ),
    ],
    ("grpo/curriculum/survey.py", "grpo/test_preflight.py"): [
        (
            "groups that vary are enough",
            "LevelSurvey.is_within_reach",
            "self.varied >= VARIED and self.any_exact >= ANY_EXACT",
            "self.varied >= VARIED",
        ),
    ],
    ("grpo/curriculum/preflight.py", "grpo/test_preflight.py"): [
        (
            "the easiest level within reach",
            "choose_start",
            "max(reachable, key=lambda row: row.level)",
            "min(reachable, key=lambda row: row.level)",
        ),
        (
            "solved levels left out before one out of reach",
            "_past_the_solved",
            "solved if following and following.is_within_reach else solved - 1",
            "min(solved, len(levels) - 1)",
        ),
    ],
    ("grpo/curriculum/warm_start.py", "grpo/test_ways.py"): [
        (
            "the right answer does not end",
            "right_answer",
            "(*policy.target_tokens(problem.target), policy.end)",
            "policy.target_tokens(problem.target)",
        ),
        (
            "imitation goes on when it is enough",
            "warm_start",
            "result.score < ENOUGH and result.updates < limit",
            "result.updates < limit",
        ),
    ],
    ("grpo/learn/imitate.py", "grpo/test_ways.py"): [
        (
            "imitation away from the answer",
            "imitate",
            "-(batch.weights_R[:, None] * logp_RT).sum()",
            "(batch.weights_R[:, None] * logp_RT).sum()",
        ),
    ],
    ("grpo/group_metrics.py", "grpo/test_variance.py"): [
        (
            "a bin without its upper bound",
            "",
            "from bisect import bisect_left",
            "from bisect import bisect_right as bisect_left",
        ),
    ],
    ("grpo/learn/schedule.py", "grpo/test_trainer.py"): [
        (
            "cosine falls during the warm-up",
            "lr_factor",
            "math.pi * (step - start - 1) / (steps - start)",
            "math.pi * (step - 1) / steps",
        ),
        (
            "cosine falls on every level",
            "lr_factor",
            "max(warmup, cosine_start)",
            "warmup",
        ),
    ],
    ("grpo/training/sampler.py", "grpo/test_trainer.py"): [
        (
            "tries share their numbers",
            "GroupSampler._keys",
            "sample_key(self.config.seed, step, index, sample, attempt)",
            "sample_key(self.config.seed, step, index, sample, 0)",
        ),
    ],
    ("grpo/training/problems.py", "grpo/test_trainer.py"): [
        (
            "last problem drawn again",
            "ProblemStream.mark_seen",
            "problems[-1][0] + 1",
            "problems[-1][0]",
        ),
    ],
    ("grpo/trainer.py", "grpo/test_trainer.py"): [
        (
            "skipped groups learned from",
            "Trainer.step",
            "[group for group in groups if group.action == 'keep']",
            "list(groups)",
        ),
    ],
    ("grpo/evaluate.py", "grpo/test_config.py"): [
        (
            "rate of wrong answers",
            "summarise",
            "rate_interval(round(sum(exact)), len(exact))",
            "rate_interval(len(exact) - round(sum(exact)), len(exact))",
        ),
    ],
    ("grpo/statistics.py", "grpo/test_statistics.py"): [
        ("interval of 90 %", "", "TAIL = 0.025", "TAIL = 0.05"),
        ("nothing is unseen above", "mean_bounds", "means_SD + weights_DN[:, n]", "means_SD"),
    ],
    ("grpo/evaluate.py", "test_eval.py"): [
        (
            "evaluations ignore --max-new-tokens",
            "budgets",
            "sampling.max_new_tokens",
            "0",
        ),
        (
            "samples of a problem are copies",
            "_keys",
            "sample_key('eval', seed, problem.key, i)",
            "sample_key('eval', seed, problem.key)",
        ),
    ],
    ("grpo/run/saver.py", "grpo/test_background.py"): [
        (
            "what is being written goes on learning",
            "Saver._copied",
            "self.memory.copy(live)",
            "live",
        ),
    ],
    ("grpo/run/background.py", "grpo/test_background.py"): [
        (
            "training waits for the disk",
            "Writer.collect",
            "wait or self._saved.done()",
            "True",
        ),
    ],
    ("grpo/run/checkpoint.py", "grpo/test_background.py"): [
        ("what was read back is not compared", "_on_disk", "_sha256(path) != checksum", "False"),
    ],
    ("grpo/run/checkpoint.py", "grpo/test_checkpoint.py"): [
        (
            "the first save does not count for the spacing",
            "CheckpointRules.reasons",
            "self.last is None or not is_regular",
            "not is_regular",
        ),
        ("renamed before it is on the disk", "save_checkpoint", "sync(path)", "pass"),
        ("checksums not compared", "_damage", "_sha256(file) != fact['sha256']", "False"),
        (
            "first checkpoint deleted",
            "prune",
            "{valid[0], *valid[-2:], keep_best}",
            "{*valid[-2:], keep_best}",
        ),
        (
            "step gone back to deleted",
            "remove_after",
            "step_of(path) > step",
            "step_of(path) >= step",
        ),
    ],
    ("grpo/run/rollouts.py", "grpo/test_store_logs.py"): [
        ("reward stored as the advantage", "_to_json", "advantage", "score.reward"),
    ],
    ("tasks/supply.py", "tasks/test_supply.py"): [
        ("what was trained on is held out", "held_out", "problem.key in seen", "False"),
        ("few draws end the search", "patience", "10 * max(10, most)", "2 * max(10, most)"),
        ("a problem is its own example", "Examples._draw", "{key}", "set()"),
        ("examples of the test split", "Examples._draw", "'train'", "'test'"),
    ],
    ("tasks/streams.py", "tasks/test_base.py"): [
        (
            "seed and index added",
            "problem_at",
            "f'{task.name}/{seed}/{split}/{level}/{index}'",
            "f'{task.name}/{seed + index}/{split}/{level}'",
        ),
        (
            "split not in the hash",
            "problem_at",
            "f'{task.name}/{seed}/{split}/{level}/{index}'",
            "f'{task.name}/{seed}/{level}/{index}'",
        ),
    ],
    ("tasks/shaping.py", "tasks/test_explanations.py"): [
        ("the shorter text divides", "explain", "written > wanted", "written < wanted"),
    ],
    ("grpo/tools/report/live.py", "grpo/test_report_live.py"): [
        ("any host is served", "Handler._is_allowed", "name in HOSTS", "True"),
        (
            "any token is served",
            "Handler._is_allowed",
            "is_known and name in HOSTS",
            "name in HOSTS",
        ),
    ],
    ("grpo/tools/report/samples.py", "grpo/test_report_samples.py"): [
        ("a reward is rounded twice", "rounded", "round(value, 3)", "float(f'{value:.4g}')"),
        ("no target is a target", "view_of", "split_words(group.problem.target)", "True"),
    ],
    ("grpo/tools/report/outcome.py", "grpo/test_report.py"): [
        ("learning begins although it is lost again", "learning_began", "low[-1]", "low[0]"),
    ],
    ("tasks/arithmetic.py", "tasks/test_arithmetic.py"): [
        ("problems of any split", "Arithmetic.make", "split_of_key(problem.key) == split", "True"),
    ],
    ("grpo/tools/hub.py", "grpo/test_export.py"): [
        ("a new repository is public", "push", "not is_public", "is_public"),
        ("the token is shown", "_first_line", "line.replace(token, '***')", "line"),
        ("a push without a token", "check_push", "get_token() is None", "False"),
    ],
    ("grpo/tools/model_card.py", "grpo/test_export.py"): [
        (
            "figures of later evaluations",
            "card",
            "[line for line in run.reports if line['step'] <= step]",
            "run.reports",
        ),
        ("the verdict on a later policy", "_verdict", "line['step'] <= step", "True"),
        ("a published path", "_without_folders", "Path(part).name", "part"),
    ],
    ("grpo/run/trackers.py", "grpo/test_trackers.py"): [
        ("samples as they were drawn", "samples", "rewards.__getitem__", "lambda number: number"),
        ("the text of a model is Markdown", "_cell", "char.isalnum() or char == ' '", "True"),
        ("advantages of tokens are left out", "histograms", "[advantage]", "[]"),
        (
            "a tracker that failed is used again",
            "Trackers._try",
            "self.live.pop(name, None)",
            "pass",
        ),
    ],
    ("tasks/gsm8k.py", "tasks/test_reasoning.py"): [
        ("one of several numbers counts", "number_of", "len(values) == 1", "values"),
        ("what is calculated counts", "number_of", "_UNIT_POWER.sub('', result)", "plain"),
        ("minus sign of a result dropped", "_value", "('-', '−')", "('-',)"),
    ],
    ("tasks/answers.py", "tasks/test_answers.py"): [
        ("first marker counts", "_last", "pass", "break"),
        ("minus sign of typesetters dropped", "_number", "('-', '−')", "('-',)"),
        ("what was thought is read", "_after_thinking", "text[start:]", "text"),
        ("one number is an expression", "_place", "numbers >= 2", "numbers >= 1"),
    ],
    ("data/corpus.py", "data/test_corpus.py"): [
        ("the user's texts repeat", "without_repeats", "shingles.add(document)", "pass"),
    ],
    ("data/foreign.py", "data/test_foreign.py"): [
        (
            "every file of a folder is read",
            "_licences",
            "found[::-(-len(found) // MOST_FILES) or 1]",
            "found",
        ),
    ],
    ("grpo/tools/evaluation/texts.py", "test_eval.py"): [
        (
            "texts that were trained on are evaluated on",
            "held_out_texts",
            "known |= set((saved.get('corpus') or {}).values())",
            "pass",
        ),
    ],
    ("tasks/interleave.py", "tasks/test_interleave.py"): [
        (
            "the embedded corpus counts as the user's own",
            "Interleave.unseen",
            "{*known, *map(fingerprint, load_corpus())}",
            "known",
        ),
        (
            "balance is the smaller share",
            "Interleave._score",
            "min(share_a, share_b) / max(share_a, share_b, 1e-09)",
            "min(share_a, share_b)",
        ),
        (
            "credits of a text that runs on",
            "Interleave.credits",
            "max(i, len(target), 1)",
            "max(len(target), 1)",
        ),
    ],
    ("tasks/trap_names.py", "tasks/test_trap_names.py"): [
        ("B leads the other way", "TrapNames.kinds", "lead == 1", "lead == -1"),
        ("a slip changes the strategy", "", "LEAST = 3", "LEAST = 0"),
    ],
    ("align/diagonals.py", "align/test_needleman.py"): [
        (
            "gap opened at every symbol",
            "Batch._affine",
            "_best(pair + opening, delete, insert + opening, moves)",
            "_best(pair + opening, delete + opening, insert + opening, moves)",
        ),
        ("ties broken the other way", "_best", "delete < top", "delete <= top"),
        (
            "cells that overflow",
            "Batch.__init__",
            "np.min_scalar_type(floor - bound)",
            "np.dtype(np.int8)",
        ),
        ("numbers that are not finite", "_finite", "math.isfinite(number)", "True"),
    ],
    ("align/bitparallel.py", "align/test_needleman.py"): [
        ("carries run into the neighbour", "BitColumns.__init__", "len(first) + 1", "len(first)"),
    ],
    ("align/prefixes.py", "align/test_prefixes.py"): [
        ("end of the target not open", "prefix_scores", "row_BM.max(axis=1)", "row_BM[:, -1]"),
    ],
    ("align/words.py", "align/test_words.py"): [
        (
            "ends counted in the normalised text",
            "word_ends",
            "_WORD.finditer(text)",
            "_WORD.finditer(normalise(text))",
        ),
    ],
}
MUTANTS = [
    Mutant(name, file, " ".join(f"tests/{path}" for path in tests.split()), where, old, new)
    for (file, tests), rows in TABLE.items()
    for name, where, old, new in rows
]
