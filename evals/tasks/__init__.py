"""The eval tasks: YAML for lm-eval, nano suites under `nano/` and public ones under `real/`; `evals.tasks.loading` brings them up."""
