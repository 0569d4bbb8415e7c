"""CORE: task bundles, prompts, batched scoring and the suite."""
