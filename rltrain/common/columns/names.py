"""Names of the columns of a batch and of the numbers per sample. Each has its shape, dtype, maker and readers.

Phases exchange data under these names. Code uses these constants, so that one search finds maker and readers of a
column, and a misspelt name is an error.

A response may contain context tokens that the policy did not generate, such as a tool's text between two turns;
`RESPONSE_MASK` is 0 there. All other token columns have entries only for tokens of the policy, in order. Therefore
losses, denominators, advantages, KL, correction and metrics cannot include context tokens by mistake, and no pass
computes logits for them.

Token columns stay in the object store. Numbers [n] are also on the driver (`Samples.numbers`) and become columns of a
batch if a pass requests them. The scorers' numbers, which users name (`SCORER`), and the sums that a pass returns per
rank are not listed.
"""

from __future__ import annotations

from dataclasses import dataclass

# Shapes: n samples; a ragged column has one row per sample, a dictionary-encoded one has one row per prompt.
PER_SAMPLE = "[n]"
PER_PROMPT_TOKEN = "[prompts, prompt_length]"
PER_PROMPT = "[prompts]"
PER_ANSWER_TOKEN = "[n, response_length]"
PER_POLICY_TOKEN = "[n, policy_tokens]"
# All computed tokens: the response without its last token, which predicts nothing.
PER_COMPUTED_TOKEN = "[n, prompt_length + response_length - 1]"


@dataclass(frozen=True)
class Column:
    """Properties of a column. ``dtype`` is the name in NumPy and torch; ``str`` means a list of Python strings."""

    shape: str
    dtype: str
    maker: str
    readers: str


COLUMNS: dict[str, Column] = {}


def _add(name: str, shape: str, dtype: str, maker: str, readers: str) -> str:
    COLUMNS[name] = Column(shape, dtype, maker, readers)
    return name


# -- made by the rollout -----------------------------------------------------------------------------------------------

PROMPT = _add("prompt", PER_PROMPT_TOKEN, "int32", "rollout", "every pass, update")
# Pixels, grids and positions (`data.images.PromptImages`), or None for a text-only prompt.
IMAGES = _add("images", PER_PROMPT, "object", "rollout", "every pass, update")
RESPONSE = _add("response", PER_ANSWER_TOKEN, "int32", "rollout", "every pass, update")
RESPONSE_MASK = _add(
    "response_mask", PER_ANSWER_TOKEN, "bool", "rollout: 1 = token of the policy", "every pass, update"
)
ROLLOUT_LOG_PROBS = _add("rollout_log_probs", PER_POLICY_TOKEN, "float32", "rollout", "correction, ref pass, update")
TEXT = _add("text", PER_SAMPLE, "str", "rollout", "scorers, reward model, files")
PROMPT_LENGTH = _add("prompt_length", PER_SAMPLE, "int64", "rollout", "balance, metrics")
RESPONSE_LENGTH = _add("response_length", PER_SAMPLE, "int64", "rollout", "balance, rewards, metrics")
POLICY_TOKENS = _add("policy_tokens", PER_SAMPLE, "int64", "rollout: sum of the mask", "advantages, metrics")
LOSS_TOKENS = _add("loss_tokens", PER_SAMPLE, "int64", "rollout; less rejected, left out", "denominators, estimators")
TRUNCATED = _add("truncated", PER_SAMPLE, "bool", "rollout", "metrics, files")
# These columns exist only with tools. num_turns counts turns of the policy, the others count calls.
NUM_TURNS, TOOL_CALLS, TOOL_ERRORS, TOOL_TIMEOUTS, UNREADABLE_CALLS, CALLS_NOT_RUN = OF_TURNS = tuple(
    _add(name, PER_SAMPLE, "int64", "rollout", "metrics, files")
    for name in ("num_turns", "tool_calls", "tool_errors", "tool_timeouts", "unreadable_calls", "calls_not_run")
)
# True if the trajectory failed for a reason other than the policy. It is then excluded from losses and baselines.
AGENT_FAILED = _add("agent_failed", PER_SAMPLE, "bool", "rollout", "advantages, update, metrics, files")
TOOL_S = _add("tool_s", PER_SAMPLE, "float32", "rollout: seconds in which it waited for tools", "metrics, files")
# Arrays with one entry per turn of the policy (at least one): the reward from tools and environment, the number of
# tokens, and a hash of the policy's input before the turn.
TURN_REWARDS, TURN_TOKENS, TURN_STATES = PER_TURN = tuple(
    _add(name, PER_SAMPLE, "object", "rollout", "estimators over turns")
    for name in ("turn_rewards", "turn_tokens", "turn_states")
)
# Images after the prompt (a `data.images.PromptImages` or None) and their patches or tiles.
RESPONSE_IMAGES = _add("own_images", PER_SAMPLE, "object", "rollout", "every pass, update")
ANSWER_IMAGES = _add("answer_images", PER_SAMPLE, "int64", "rollout", "balance, metrics, files")
ANSWER_IMAGE_ROWS = _add("answer_image_rows", PER_SAMPLE, "int64", "rollout", "balance")
OF_SEVERAL_TURNS = (*OF_TURNS, AGENT_FAILED, TOOL_S, *PER_TURN, ANSWER_IMAGES, ANSWER_IMAGE_ROWS)
ENDED_S = _add("ended_s", PER_SAMPLE, "float32", "rollout", "metrics")
ABORTED = _add("aborted", PER_SAMPLE, "bool", "rollout", "driver: becomes `complete`")
# Index of the response in its task: prompt index * responses per prompt + sample.
SLOT = _add("slot", PER_SAMPLE, "int64", "rollout; pending prompts", "driver; rollout")

# -- known to the driver -----------------------------------------------------------------------------------------------

# Index of the prompt in the data, and in the batch.
ROW = _add("row", PER_SAMPLE, "int32", "driver", "scorers, reward model, sampler, files")
GROUP = _add("group", PER_SAMPLE, "int64", "driver", "balance, estimators, metrics")
SAMPLE_ID = _add("sample_id", PER_SAMPLE, "int64", "update of the actor", "random part of a selection")
ENGINE = _add("engine", PER_SAMPLE, "int64", "driver: the replica that answered", "metrics")
# served: a replica generated part of the response in this step; complete: the response has ended.
SERVED = _add("served", PER_SAMPLE, "bool", "driver", "pending prompts, metrics")
COMPLETE = _add("complete", PER_SAMPLE, "bool", "driver", "pending prompts, metrics, files")
# Number of tokens from earlier policies, sum of all tokens' ages in steps, and age of the oldest token (carry_over).
CARRIED_LENGTH = _add("carried_length", PER_SAMPLE, "int64", "pending prompts", "correction, metrics")
TOKEN_AGES = _add("token_ages", PER_SAMPLE, "int64", "pending prompts", "metrics")
OLDEST = _add("oldest", PER_SAMPLE, "int64", "pending prompts", "metrics")

# -- rewards -----------------------------------------------------------------------------------------------------------

# score: the value of a response, from rule_score, model_score and overlong. reward: score minus the KL penalty.
SCORE = _add("score", PER_SAMPLE, "float64", "rewards", "advantages, metrics, files")
REWARD = _add("reward", PER_SAMPLE, "float64", "rewards; less KL: advantages", "estimators, metrics")
RULE_SCORE = _add("rule_score", PER_SAMPLE, "float64", "scorers", "accuracy, metrics, files")
MODEL_SCORE = _add("model_score", PER_SAMPLE, "float64", "reward model", "metrics, files")
OVERLONG = _add("overlong", PER_SAMPLE, "float64", "rewards", "metrics, files")
REWARD_FAILED = _add("reward_failed", PER_SAMPLE, "float64", "scorers: 1 = failed", "rewards, metrics")
REWARD_TIMEOUT = _add("reward_timeout", PER_SAMPLE, "float64", "scorers: 1 = timeout", "metrics")
REWARD_ERROR = _add("reward_error", PER_SAMPLE, "str", "scorers, where one failed", "files")
# Messages to a judge on the run's devices, and its replies (`rewards.judge.reply.Reply`). In these batches a sample is
# a request.
JUDGE_MESSAGE = _add("judge_message", PER_SAMPLE, "str", "scorers", "judge")
MESSAGE_LENGTH = _add("message_length", PER_SAMPLE, "int64", "scorers: characters", "driver: who judges what")
JUDGE_REPLY = _add("judge_reply", PER_SAMPLE, "object", "judge", "scorers")
BASELINE = _add("baseline", PER_SAMPLE, "float64", "greedy response (remax)", "advantages")
# Prefix of numbers and texts that a scorer returns in addition to the score.
SCORER = "scorer/"

# -- passes of the models ----------------------------------------------------------------------------------------------

OLD_LOG_PROBS = _add("old_log_probs", PER_POLICY_TOKEN, "float32", "old_log_prob pass, update", "ref pass, update")
SUM_PI_SQUARED = _add(
    "sum_pi_squared",
    PER_POLICY_TOKEN,
    "float32",
    "old_log_prob pass, where an estimator asks for it",
    "token advantages",
)
ENTROPY = _add("entropy", PER_POLICY_TOKEN, "float32", "old_log_prob pass, with actor.top_entropy_quantile", "update")
# [layers with experts, experts per token] of each token.
ROUTED_EXPERTS = _add(
    "routed_experts", PER_COMPUTED_TOKEN, "uint8 or int16", "old_log_prob pass (R2), rollout (R3)", "the same, update"
)
HAS_OLD_LOG_PROBS = _add("has_old_log_probs", PER_SAMPLE, "bool", "driver", "metrics")
IS_WEIGHTS = _add("is_weights", PER_POLICY_TOKEN, "float32", "correction", "actor loss")
LOSS_MASK = _add("loss_mask", PER_POLICY_TOKEN, "bool", "correction: 0 = rejected", "losses, advantages")
REF_LOG_PROBS = _add("ref_log_probs", PER_POLICY_TOKEN, "float32", "ref pass", "KL in the loss")
REF_KL = _add("ref_kl", PER_POLICY_TOKEN, "float32", "ref pass, KL in the reward", "token advantages")
KL_SUM = _add("kl_sum", PER_SAMPLE, "float64", "ref pass, KL in the reward", "reward of the response")
TEACHER_LOG_PROBS = _add("teacher_log_probs", PER_POLICY_TOKEN, "float32", "teacher pass", "teacher's part of the loss")
LOG_PROB_SUM = _add("log_prob_sum", PER_SAMPLE, "float64", "old_log_prob pass of supervised validation", "validation")
VALUES = _add("values", PER_POLICY_TOKEN, "float32", "values pass", "token advantages, critic loss")

# -- advantages --------------------------------------------------------------------------------------------------------

# The number is sent to devices as float32, because not every accelerator supports float64.
ADVANTAGE = _add(
    "advantage", PER_SAMPLE, "float64 or float32", "estimators (of tokens: the mean)", "actor loss, metrics"
)
ADVANTAGES = _add(
    "advantages", PER_POLICY_TOKEN, "float32", "estimators of tokens and turns, before whitening", "actor loss"
)
RETURNS = _add("returns", PER_POLICY_TOKEN, "float32", "token estimators", "critic loss")
SIGNAL = _add(
    "signal", PER_SAMPLE, "bool", "estimators of tokens and turns: 1 = some advantage is not 0", "driver: what to skip"
)
MASKED = _add("left_out", PER_SAMPLE, "bool", "driver: masked in the loss", "advantages, update")
EXCLUDED_FROM_BASELINE = _add("uncompared", PER_SAMPLE, "bool", "driver: not in the baseline (failed)", "advantages")
ZERO_ADVANTAGE = _add("silent", PER_SAMPLE, "bool", "driver: no gradient, so not computed", "callbacks")
SELECTED = _add("selected", PER_POLICY_TOKEN, "bool", "update: tokens a loss treats differently", "actor loss")
GROUP_WEIGHT = _add("group_weight", PER_SAMPLE, "float32", "update: weight by the others of the group", "actor loss")
HIGH_ENTROPY = _add("uncertain", PER_POLICY_TOKEN, "bool", "update: tokens of high entropy", "actor loss")

# Columns that passes read, and columns that a rollout writes.
PROMPT_AND_ANSWER = (PROMPT, RESPONSE, RESPONSE_MASK)
ANSWER = (RESPONSE, RESPONSE_MASK, ROLLOUT_LOG_PROBS)
GENERATED = (PROMPT, *ANSWER)
