"""One suite at full size on two deployments: `run_suite` asks both over HTTP, keeps every item, scores through lm-eval and judges.

    result = run_suite(
        "gsm8k",                    # evals.tasks.loading.SUITES
        stock=Side(role="stock", fingerprint="…", endpoints=(config_a, config_b), connect=open_endpoint, concurrency=64),
        candidate=Side(role="candidate", …),
        policy=served_policy("gsm8k", load_policy(), family=4),
        plan=ServedPlan(chat=True, sampling=Sampling(temperature=1.0, top_p=0.95), max_repeats=8, max_minutes=120.0),
        folder=run_folder,          # records; the same folder resumes
        progress=None,              # evals.serving.progress.display() when None: bars on a terminal, else plain lines
    )
    result.gate                     # evals.gate.SuiteGate: status, reasons and everything measured
    result.pairs                    # evals.pairing.PairedAnswers, for evals.measurements.{measurements_of, details_of}
    result.throughput["candidate"]  # evals.serving.executor.Throughput: items, tokens, seconds, in-flight share, failures by kind
    result.report                   # bytes: canonical JSON, the same for any number of workers or endpoints

What a side gives:
    endpoints   picklable configurations, one a data-parallel replica (or the same one when there is one)
    connect     an importable function: configuration -> endpoint; called in the process that asks (maybe a worker on another host)
    serving     a context manager that is entered while the side is asked: starts and stops servers that share one set of GPUs

What an endpoint needs (evals.serving.asking holds the adapter; nothing else of the client is used):
    async acomplete(prompt, *, max_tokens, temperature, top_p, stop, seed, extra) -> reply
    async achat(messages, *, …the same) -> reply
    async aclose()
    reply: text, reasoning, token_ids, prompt_token_ids, finish_reason, usage (prompt_tokens, completion_tokens), attempts, seconds
    errors: typed; those of the connection (never reached the server) apart from those of a server that took the request
"""

from __future__ import annotations
