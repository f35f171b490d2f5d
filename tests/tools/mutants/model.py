"""Mutants of the model."""

# The body of `grpo.model.encoding.text_of`.
TEXT_OF = "tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)"

# See `mutants`.
TABLE = {
    ("grpo/model/finite.py", "grpo/test_bad_numbers.py grpo/test_bad_scores.py"): [
        (
            "each rank judges by its own numbers",
            "check_step",
            "ranks.all_reduce([norm])",
            "pass",
        ),
    ],
    ("grpo/model/memory.py", "grpo/test_memory.py"): [
        ("values of the cache forgotten", "Shape.cache", "2 * self.layers", "self.layers"),
        (
            "activations and caches may take more than there is",
            "update_tokens",
            "min(CACHE_SHARE * memory.left, busy_tokens * each)",
            "busy_tokens * each",
        ),
        (
            "gradient checkpointing makes no room",
            "update_tokens",
            "shape.activations(gradient_checkpointing)",
            "shape.activations()",
        ),
        (
            "sums shared out as well",
            "optimizer_bytes",
            "masters + MOMENT_BYTES * trained // parts + sums",
            "masters + MOMENT_BYTES * trained // parts + sums // parts",
        ),
    ],
    ("grpo/model/prefill.py", "grpo/test_prefill.py"): [
        (
            "no token left after the beginning",
            "common_beginning",
            "min(prompts)[:-1]",
            "min(prompts)",
        ),
        ("first two beginnings alone", "common_beginning", "max(prompts)", "prompts[0]"),
        (
            "rests without their beginning's length",
            "after_beginning",
            "PrefixCache(common + lengths_P, common + T)",
            "PrefixCache(lengths_P, common + T)",
        ),
        ("last token of the padding", "after_beginning", "lengths_P - 1", "T - 1"),
        ("masks of any size", "prefill", "scores <= MAX_SCORES", "scores"),
    ],
    ("grpo/model/varlen_attention.py", "grpo/test_packing.py"): [
        (
            "flash kernel told of one query",
            "_flash",
            "max(segments.max_queries, MIN_QUERIES)",
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
    ("grpo/model/probe_runs.py", "grpo/test_model_check.py"): [
        ("caps by their effect alone", "own_logprobs", "getattr(config, name, None)", "False"),
        (
            "layers that attend elsewhere",
            "attends_once",
            "sorted(layers)",
            "sorted(packing.layers)",
        ),
        ("convolutions are shared away", "attends_once", "not has_convolution", "True"),
    ],
    ("grpo/model/packed_attention.py", "grpo/test_packing.py"): [
        (
            "completion sees its own future",
            "Packing.__init__",
            "VarlenSegments(lengths, lengths, True, device)",
            "VarlenSegments(lengths, lengths, False, device)",
        ),
        (
            "first token predicted by its neighbour",
            "_lay_out",
            "prompt_ends[prompt] - 1",
            "prompt_ends[prompt] - 2",
        ),
        (
            "no gradient to the prompt's keys",
            "_SharedPrefixAttention.backward",
            "d_key + on_key",
            "d_key",
        ),
        (
            "positions begin anew behind the prompt",
            "_lay_out",
            "torch.arange(begin, end) + prompt_lengths[prompt]",
            "torch.arange(begin, end)",
        ),
        (
            "stem of the completion before, one token too long",
            "_branches",
            "before.path[: common_length(completions[before.completion][:-1], read)]",
            "before.path[: 1 + common_length(completions[before.completion][:-1], read)]",
        ),
        (
            "completions share what they have in common after a difference",
            "common_length",
            "next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))",
            "sum(a == b for _, (a, b) in pairs)",
        ),
        (
            "no gradient to the stem's values",
            "_SharedPrefixAttention.backward",
            "d_value.index_add_(0, keys, on_value)",
            "pass",
        ),
        (
            "one token of several stands in for all of one predictor",
            "_distinct_pairs",
            "predictors_M * (targets_M.max() + 1) + targets_M",
            "predictors_M",
        ),
        (
            "log-sum-exp without the stem",
            "_SharedPrefixAttention.forward",
            "merged[places], merged_lse[places] = (both, both_lse)",
            "merged[places] = both",
        ),
    ],
    ("grpo/model/merged_linear.py", "grpo/test_lean.py"): [
        (
            "adapter's scale ignored",
            "MergedLinear.copies",
            "WeightCopy(lora_b, adapter.b, adapter.scaling)",
            "WeightCopy(lora_b, adapter.b, 1.0)",
        ),
        (
            "adapter's scale ignored where layers are merged",
            "MergedLinear.copies",
            "WeightCopy(block, adapter.b, adapter.scaling)",
            "WeightCopy(block, adapter.b, 1.0)",
        ),
        (
            "copies into buffers that are gone",
            "Copies.refresh",
            "self._by_factor = None",
            "pass",
        ),
    ],
    (
        "grpo/model/check.py",
        "grpo/test_model_check.py::test_the_path_does_not_depend_on_how_far_an_adapter_was_trained "
        "grpo/test_model_check.py::test_a_new_adapter_hides_no_mistake_in_how_it_is_merged",
    ): [
        ("new adapters compared as they are", "probe_adapters", "ADAPTER_STD", "0.0"),
        (
            "adapters left as the comparison made them",
            "probe_adapters",
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
    ("grpo/model/ops.py", "grpo/test_lean.py"): [
        ("sign within the norm's gradient", "_AddNorm.backward", "-E", "E"),
        ("residual's gradient dropped", "_AddNorm.backward", "d_sum.add_(d_total)", "d_sum"),
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
    ("grpo/model/context.py", "grpo/test_context.py"): [
        ("windows are no limit", "context_of", "window and window < context", "False"),
        ("windows that are off are a limit", "attention_window", "'sliding' in kind", "True"),
        ("LongRoPE is no limit", "context_of", "original < context", "False"),
    ],
    ("grpo/model/prefix_cache.py", "grpo/test_context.py"): [
        (
            "padded prompts count",
            "PrefixCache.reorder",
            "lengths_R.max()",
            "filled_R.max() + self.padding_PL.shape[1]",
        ),
        (
            "nothing outgrows the window",
            "PrefixCache.reorder",
            "lengths_R.max()",
            "filled_R.max()",
        ),
    ],
    ("grpo/model/encoding.py", "grpo/test_encoding.py"): [
        (
            "control tokens unseen",
            "text_of",
            TEXT_OF,
            TEXT_OF.replace("skip_special_tokens=False", "skip_special_tokens=True"),
        ),
        (
            "spaces before marks cleaned up",
            "text_of",
            TEXT_OF,
            TEXT_OF.replace(", clean_up_tokenization_spaces=False", ""),
        ),
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
            "encode(tokenizer, list(texts), add_special_tokens=False, split_special_tokens=True)",
            "encode(tokenizer, list(texts), add_special_tokens=False)",
        ),
    ],
    ("grpo/model/encoding.py", "grpo/test_prompts.py"): [
        (
            "a turn that is left out passes",
            "render",
            "''.join(said.split()) not in passed_on",
            "False",
        ),
        (
            "a template that trims drops the turn",
            "render",
            "''.join(said.split()) not in passed_on",
            "said not in text",
        ),
    ],
    ("grpo/model/prompts.py", "grpo/test_prompts.py"): [
        (
            "the first conversation stands for all",
            "check_conversations",
            "tuple((role for role, _ in problem.turns))",
            "0",
        ),
        (
            "the shortest conversation stands for all",
            "check_conversations",
            "sum((len(said) for _, said in problem.turns))",
            "-sum((len(said) for _, said in problem.turns))",
        ),
        (
            "examples after the question",
            "PromptFormat.turns",
            "(*system, *shown, *question)",
            "(*system, *question, *shown)",
        ),
    ],
    ("grpo/model/check.py", "grpo/test_model_check.py"): [
        ("what shows only later", "_set_path", "path != 'plain' and _needs_plain(model)", "False"),
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
    ("grpo/model/precision.py", "grpo/test_precision.py"): [
        (
            "what layers pass on is not looked at",
            "fits_float16",
            "module.register_forward_hook(see)",
            "model.register_forward_hook(see)",
        ),
        ("the limit is float16's own", "fits_float16", "LIMIT", "1e30"),
        (
            "a continued run changes its precision",
            "default_dtype",
            "is_continued and saved is not None",
            "False",
        ),
    ],
    ("grpo/model/load.py", "grpo/test_precision.py"): [
        (
            "a model that does not fit stays in float16",
            "_load_base",
            "_load_model(files.source, device, torch.bfloat16, options.quantise)",
            "_load_model(files.source, device, dtype, options.quantise)",
        ),
        (
            "a continued run is asked again",
            "_load_base",
            "is_automatic and dtype == torch.float16 and not files.is_continued",
            "is_automatic and dtype == torch.float16",
        ),
    ],
    ("grpo/model/load.py", "grpo/test_weights.py"): [
        ("missing weights pass", "_load_model", "info['missing_keys']", "()"),
        ("threads load at once", "_one_thread", "_LOCK", "nullcontext()"),
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
            "copy.deepcopy(model) if is_new else _load_model(resolve(spec), device, model.dtype)",
            "copy.copy(model) if is_new else _load_model(resolve(spec), device, model.dtype)",
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
    ("grpo/model/encoding.py", "grpo/test_endings.py"): [
        (
            "the shortest of two end tokens",
            "one_of",
            "sorted(texts, key=len, reverse=True)",
            "sorted(texts, key=len)",
        ),
    ],
    ("grpo/model/adapter.py", "library/test_loop.py"): [
        (
            "layers of images adapt",
            "_beside_the_text",
            "module not in of_text",
            "False",
        ),
    ],
    ("grpo/training/build.py", "library/test_loop.py"): [
        (
            "the width of a whole model",
            "with_learning_rate",
            "text_config(policy.causal.config)",
            "policy.causal.config",
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
}
