"""`cache`: keep activations as they pass, to read them later.

This is what `hooks.attach("blocks.3.attn", "output")` uses::

    with HookManager(model) as hooks:
        hooks.use("cache", at="blocks.*.output", positions=-1, dtype=torch.float32)
        model(token_ids)
        hooks.get("blocks.3.output")  # (B, 1, D)
"""

from kamui_cache.cache import Cache

__all__ = ["Cache"]
