"""Names that the serving profile uses everywhere: roles, their tables in the file, suites, and the facts that identify a server."""

SIDES = ("stock", "candidate")  # the roles; the tables of the file are [baseline] and [candidate]
TABLE_OF = {"stock": "baseline", "candidate": "candidate"}
REAL_SUITES = ("gsm8k", "gpqa_diamond_cot_zeroshot", "aime25", "mrcr")
NANO_SUITES = ("gsm8k_nano", "gpqa_diamond_nano", "aime25_nano", "mrcr_nano")
IDENTITY_FIELDS = (
    "model",
    "revision",
    "dtype",
    "tensor_parallel",
    "quantization",
    "max_model_len",
    "tokenizer",
    "chat_template",
    "version",
)
