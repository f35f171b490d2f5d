"""Mutants of learning from groups."""

TRAINER = (
    "grpo/test_trainer_groups.py grpo/test_trainer.py grpo/test_trainer_rates.py "
    "grpo/test_trainer_control.py"
)

# See `mutants`.
TABLE = {
    ("grpo/learn/oom_retry.py", "grpo/test_trainer.py"): [
        (
            "one of several ranks repeats alone",
            "OomRetry.run",
            "self.optimizer.has_exchanged",
            "False",
        ),
        (
            "the decoder's memory is freed once",
            "OomRetry.run",
            "self.policy.free_decoder()",
            "pass",
        ),
        (
            "micro-batches stay small with checkpointing",
            "OomRetry._save_memory",
            "max(longest, self.chosen or self.policy.tokens_at_once)",
            "longest",
        ),
        (
            "completions are cut",
            "OomRetry._save_memory",
            "max(longest, self.chosen or self.policy.tokens_at_once)",
            "self.chosen or self.policy.tokens_at_once",
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
            "a ratio may become infinite",
            "_log_ratio",
            "(logp_RT - zero_padding(inputs.old_RT, inputs.mask_RT)).clamp(max=MAX_LOG_RATIO)",
            "logp_RT - zero_padding(inputs.old_RT, inputs.mask_RT)",
        ),
        (
            "a row that nobody sampled has a KL",
            "step_loss",
            "{name: zero_padding(term_RT, sampled_R[:, None]) for name, term_RT in terms.items()}",
            "terms",
        ),
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
        ("small KL drowns in rounding", "kl_k3", "(ref_RT - logp_RT).double()", "ref_RT - logp_RT"),
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
            "zero_padding(x_RT.detach(), mask_RT)",
            "x_RT.detach().clone()",
        ),
        (
            "padding of a user's loss reaches the gradient",
            "_CheckedTerm.backward",
            "zero_padding(d_RT, inputs.mask_RT)",
            "d_RT",
        ),
        (
            "the gradient of a user's loss is not checked",
            "_CheckedTerm.backward",
            "own.check_finite(checked[number], inputs, 'its gradient')",
            "None",
        ),
    ],
    ("grpo/learn/batch.py", "grpo/test_truncation.py"): [
        (
            "truncated completions stay",
            "_rows",
            "settings.masks_truncated and completion.is_truncated",
            "False",
        ),
        (
            "truncated completions stay in the denominator",
            "_rows",
            "[len(completion.tokens) for rows in kept for _, completion in rows]",
            "[len(completion.tokens) for group in groups for completion in group.completions]",
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
        (
            "entropy's gradient without its mean",
            "_LinearLogprobs.backward",
            "of_entropy_nV.addcmul_(probability_nV, H_N[part, None], value=-1)",
            "pass",
        ),
    ],
    ("grpo/learn/update.py", "grpo/test_bad_numbers.py grpo/test_bad_scores.py"): [
        (
            "weights not looked at after the step",
            "update",
            "check_step(optimizer.tensors().values(), "
            "partial(named_tensors, policy, optimizer), ranks)",
            "pass",
        ),
    ],
    ("grpo/learn/optimizer.py", "grpo/test_bad_numbers.py grpo/test_bad_scores.py"): [
        (
            "moments not looked at after the step",
            "Optimizer.tensors",
            "found[number, name] = value",
            "pass",
        ),
    ],
    (
        "grpo/learn/update.py",
        "grpo/update/test_exact.py grpo/update/test_step.py grpo/update/test_precision.py",
    ): [
        (
            "truncation not seen by the loss",
            "completion_logprobs",
            "Distribution(packing.distinct(batch.temperatures_R[places_M // T]), truncate, "
            "has_entropy_gradient)",
            "Distribution(packing.distinct(batch.temperatures_R[places_M // T]), None, "
            "has_entropy_gradient)",
        ),
        ("temperature of the first row", "completion_logprobs", "places_M // T", "0 * places_M"),
        (
            "parity is the KL from the trainer to the sampler",
            "_figures",
            "kl_k3(each.batch.old_RT, each.logp_RT)",
            "kl_k3(each.logp_RT, each.batch.old_RT)",
        ),
        (
            "the host waits for each micro-batch",
            "_backward",
            "loss.detach()",
            "torch.tensor(loss.item())",
        ),
        (
            "entropies of an own loss have no gradient",
            "_backward",
            "settings.own_loss is not None",
            "False",
        ),
        (
            "reference is the policy",
            "_backward",
            "completion_logprobs(reference, batch, packing=packing)",
            "completion_logprobs(policy, batch, packing=packing)",
        ),
        (
            "the reference is cut as well",
            "_backward",
            "completion_logprobs(reference, batch, packing=packing)",
            "completion_logprobs(reference, batch, settings.truncate, packing)",
        ),
        (
            "first pass remembered with its gradient",
            "_backward",
            "_logprobs_of_first_pass(first_pass, batch, logp_RT.detach())",
            "_logprobs_of_first_pass(first_pass, batch, logp_RT)",
        ),
        (
            "gspo's ratio is taken to the sampler",
            "_backward",
            "settings.kind == 'gspo' and is_half",
            "False",
        ),
        (
            "importance not truncated",
            "_backward",
            "(first_RT - old_RT).exp().clamp(max=settings.importance_limit)",
            "(first_RT - old_RT).exp()",
        ),
    ],
    ("grpo/learn/batch.py", "grpo/test_batch.py"): [
        (
            "loss normalised over the micro-batch",
            "_micro_batch",
            "[row.weight for row in rows]",
            "[1 / int(mask_RT.sum()) for _ in rows]",
        ),
        (
            "every rank learns from all",
            "_assign",
            "[parts[number] for number in sorted(local)]",
            "parts",
        ),
        (
            "parts are cut by one rank's memory before they are dealt",
            "micro_batches",
            "_parts_to_deal(groups, rows, ranks)",
            "[p for part in _parts_to_deal(groups, rows, ranks) "
            "for p in _cut_to_fit(part, micro_tokens)]",
        ),
        ("micro-batches hold whole groups", "_cut_to_fit", "not micro_tokens", "True"),
    ],
    ("grpo/learn/optimizer.py", "test_ranks.py"): [
        (
            "gradients of other ranks left out",
            "Optimizer.collect",
            "self.ranks.all_reduce(gradients)",
            "pass",
        ),
    ],
    ("grpo/learn/optimizer.py", "grpo/update/test_loss_scale.py"): [
        ("gradients of the passes before stay", "Optimizer.gradients", "self.clear()", "pass"),
        (
            "gradients keep the factor",
            "Optimizer.collect",
            "torch._foreach_div_(gradients, self.loss_scale.factor)",
            "pass",
        ),
        ("the loss is not scaled", "Optimizer.backward", "self.loss_scale.factor", "1.0"),
        (
            "an overflow is not repeated",
            "Optimizer.gradients",
            "math.isfinite(norm) or not self.loss_scale.reduce()",
            "True",
        ),
        (
            "the factor is forgotten on resume",
            "Optimizer.load_state_dict",
            "self.loss_scale = replace(self.loss_scale, **saved['loss_scale'])",
            "pass",
        ),
    ],
    ("grpo/learn/loss_scale.py", "grpo/update/test_loss_scale.py"): [
        ("the factor never grows back", "LossScale.count_step", "2 * self.factor", "self.factor"),
        ("the factor falls below 1", "LossScale.reduce", "self.factor <= 1", "False"),
        (
            "bfloat16 is scaled",
            "LossScale.of",
            "dtype == torch.float16",
            "dtype != torch.float32",
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
        ("no room is made for the second try", "Optimizer.step", "make_room()", "pass"),
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
    ("grpo/learn/update.py", "grpo/test_demonstrations.py"): [
        (
            "a demonstration keeps log-probabilities of 0",
            "_backward",
            "torch.where(batch.sampled_R[:, None], old_RT, first_RT)",
            "old_RT",
        ),
        (
            "what was sampled is taken for shown",
            "_backward",
            "torch.where(batch.sampled_R[:, None], old_RT, first_RT)",
            "first_RT",
        ),
        (
            "the tokens of a demonstration are counted",
            "_backward",
            "step_loss(inputs, settings.loss, batch.sampled_R)",
            "step_loss(inputs, settings.loss)",
        ),
        (
            "the KL counts the tokens of a demonstration",
            "_figures",
            "zero_padding(kl_k3(each.batch.old_RT, each.logp_RT), is_sampled_RT)",
            "zero_padding(kl_k3(each.batch.old_RT, each.logp_RT), each.batch.mask_RT)",
        ),
        (
            "each pass has a ratio of 1",
            "_backward",
            "_logprobs_of_first_pass(first_pass, batch, logp_RT.detach())",
            "logp_RT.detach()",
        ),
    ],
    ("grpo/learn/credit.py", "grpo/test_demonstrations.py"): [
        (
            "a demonstration's tokens are compared with none",
            "token_advantages",
            "row[:1] * len(row) if completion.is_demonstration else row",
            "row",
        ),
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
    ("grpo/learn/imitate.py", "grpo/test_ways.py"): [
        (
            "imitation away from the answer",
            "_backward",
            "-(batch.weights_R[:, None] * logp_RT).sum()",
            "(batch.weights_R[:, None] * logp_RT).sum()",
        ),
    ],
    ("grpo/learn/schedule.py", TRAINER): [
        (
            "cosine falls during the warm-up",
            "lr_factor",
            "(step - start - 1) / (steps - start)",
            "(step - 1) / steps",
        ),
        (
            "cosine falls on every level",
            "lr_factor",
            "half if cosine_start is None else min(cosine_start, half)",
            "0 if cosine_start is None else min(cosine_start, half)",
        ),
        (
            "cosine waits for the last level, however late",
            "lr_factor",
            "half if cosine_start is None else min(cosine_start, half)",
            "steps if cosine_start is None else min(cosine_start, half)",
        ),
        (
            "reaching the last level late restarts the cosine",
            "lr_factor",
            "min(cosine_start, half)",
            "cosine_start",
        ),
    ],
}
