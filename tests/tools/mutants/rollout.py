"""Mutants of the rollout."""

# See `mutants`.
TABLE = {
    ("grpo/rollout/request.py", "grpo/test_memory.py"): [
        (
            "every batch at the first one's temperatures",
            "RolloutRequest.of",
            "self.temperatures[prompts]",
            "self.temperatures[: prompts.stop - prompts.start]",
        ),
    ],
    (
        "grpo/rollout/cuda_graph.py",
        "grpo/test_engine.py::test_the_library_of_products_is_chosen_for_a_while_and_in_silence",
    ): [
        (
            "library of products not put back",
            "cublaslt",
            "torch.backends.cuda.preferred_blas_library(before)",
            "torch.backends.cuda.preferred_blas_library()",
        ),
    ],
    ("grpo/rollout/cuda_decoder.py", "grpo/test_decoder_choice.py"): [
        (
            "adapters compared as they are",
            "new_cuda_step",
            "probe_adapters(policy.causal)",
            "torch.no_grad()",
        ),
        ("small adapters kept", "new_cuda_step", "fast.refresh()", "pass"),
    ],
    ("grpo/rollout/memory.py", "grpo/test_rollout_memory.py"): [
        (
            "what did not fit is tried again in each rollout",
            "RolloutMemory.prompts",
            "min(at_once, self.most_tokens / (completions * room))",
            "at_once",
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
            "blocks without probability are drawn",
            "draw",
            "torch.searchsorted(cdf_NB, passed_N1, right=True)",
            "torch.searchsorted(cdf_NB, passed_N1, right=False)",
        ),
        (
            "nucleus of the whole distribution behind top-k",
            "truncation.truncate",
            "kept_RV.sort(-1)",
            "logits_RV.sort(-1)",
        ),
    ],
    ("grpo/rollout/speculative.py", "grpo/test_draft_plans.py::test_plans_by_hand"): [
        (
            "drafts aimed a token too far",
            "DraftPlans.drafts",
            "request.written[:, None]",
            "request.written[:, None] + 1",
        ),
        ("end of the text not drafted", "DraftPlans._plan", "[*plan, *self.end]", "plan"),
    ],
    (
        "grpo/rollout/speculative.py",
        "grpo/test_draft_plans.py::test_a_row_whose_plan_is_not_made_yet_has_no_draft "
        "grpo/test_drafting.py::test_plans_that_are_made_meanwhile_cost_no_time_unless_they_take_"
        "longer_than_the_pass",
    ): [
        (
            "an old plan as the draft of a row that departed from it",
            "DraftPlans.drafts",
            "drafts.masked_fill(self.is_stale[request.rows, None], NO_TOKEN)",
            "drafts",
        ),
        (
            "plans made meanwhile take the time of the pass as well",
            "AcceptanceModel.length",
            "max(costs.fixed + rows * (k + 1), rows * plans * costs.plan)",
            "(costs.fixed + rows * (k + 1) + rows * plans * costs.plan)",
        ),
    ],
    (
        "grpo/rollout/generate.py",
        "grpo/test_drafting.py::test_a_long_guess_is_drafted_in_every_pass",
    ): [
        (
            "plans for this pass only, although they are made for the next",
            "_Drafter.propose",
            "2 * k + 1 if meanwhile else k",
            "k",
        ),
    ],
    (
        "grpo/rollout/generate.py",
        "grpo/test_drafting.py::test_rows_are_planned_again_while_the_next_pass_runs",
    ): [
        (
            "plans never made meanwhile",
            "_Drafter.plan_meanwhile",
            "self.decoder.costs.meanwhile",
            "False",
        ),
        (
            "plans made before the pass",
            "_Drafter.propose",
            "self.decoder.costs.meanwhile",
            "False",
        ),
    ],
    (
        "grpo/rollout/generate.py",
        "grpo/test_drafting.py::test_answers_that_begin_otherwise_than_the_guess_are_drafted_all_"
        "the_same",
    ): [
        (
            "a first token apart from the guess ends all drafts",
            "_Drafter.propose",
            "self.plans.begin(rows, live, tokens, lengths[rows])",
            "pass",
        ),
        (
            "first tokens count as rejected drafts",
            "_Drafter.observe",
            "matched = rejected = 0",
            "pass",
        ),
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
            "EagerDecoder.start",
            "torch.arange(hidden_RTE.shape[1])",
            "0 * torch.arange(hidden_RTE.shape[1])",
        ),
        (
            "budget exceeded by one",
            "EagerDecoder.finish",
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
}
