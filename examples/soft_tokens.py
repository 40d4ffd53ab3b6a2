"""Soft tokens: generate with distributions instead of tokens, while an intervention acts on every step.

At each step the next input is the mean of all token embeddings, weighted by their probabilities, so that nothing is
decided before the end. At a temperature near 0 that is greedy decoding. It works on the reference model, where a
scope puts the soft embeddings in the place of the token embeddings, and on Hugging Face models, which take
`inputs_embeds`.

    python examples/soft_tokens.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kamui.hooks import HookManager
from kamui.model import Transformer, load_pretrained


@torch.no_grad()
def soft_continuation(model: nn.Module, token_ids: Tensor, n_steps: int, *, temperature: float = 1.0) -> Tensor:
    """Continue token ids (B, S) with soft tokens; scopes that are open on the model act on every step.

    Args:
        model: The reference `Transformer`, or a causal model of Hugging Face.
        token_ids: The prompts (B, S).
        n_steps: How many soft tokens to add.
        temperature: Above 0; the smaller, the nearer to greedy decoding.

    Returns:
        The distributions, (B, n_steps, V).
    """
    table = embedding_table(model)  # (V, D)
    inputs = table[token_ids]  # (B, S, D)
    steps = []
    for _ in range(n_steps):
        logits = logits_of(model, inputs)[:, -1]  # (B, V)
        probabilities = (logits / temperature).softmax(-1)  # (B, V)
        steps.append(probabilities)
        inputs = torch.cat([inputs, (probabilities @ table)[:, None]], dim=1)  # (B, S + 1, D)
    return torch.stack(steps, dim=1)  # (B, n_steps, V)


def embedding_table(model: nn.Module) -> Tensor:
    """Return what each token is embedded as, (V, D), scaled where the model scales it."""
    embedding = model.embed.tokens if isinstance(model, Transformer) else model.get_input_embeddings()  # type: ignore[operator]
    table: Tensor = embedding(torch.arange(embedding.num_embeddings))  # (V, D)
    return table


def logits_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """Run the model on embeddings (B, S, D); returns logits (B, S, V)."""
    if not isinstance(model, Transformer):
        logits: Tensor = model(inputs_embeds=inputs, use_cache=False).logits
        return logits
    placeholders = torch.zeros(inputs.shape[:2], dtype=torch.long)  # (B, S)
    with HookManager(model) as hooks:
        hooks.attach("embed.tokens", replace_with=inputs)
        return model(placeholders)


def main() -> None:
    """Show how a temperature softens the continuation of a repeated segment, and what steering does to it."""
    model = load_pretrained("nano")
    segment = torch.randint(0, model.config.vocab_size, (1, 14), generator=torch.Generator().manual_seed(0))
    prompt = torch.cat([segment, segment[:, :7]], dim=1)
    expected = segment[:, 7:]
    for temperature in (0.01, 0.5, 1.0, 2.0):
        probabilities = soft_continuation(model, prompt, expected.size(1), temperature=temperature)
        right = probabilities.gather(-1, expected[..., None]).squeeze(-1)
        print(f"temperature {temperature}: probability of the right token {[round(p, 2) for p in right[0].tolist()]}")
    noise = torch.randn(model.config.d_model, generator=torch.Generator().manual_seed(1))
    with HookManager(model) as hooks:
        hooks.use("steering", at="blocks.0.output", vector=noise)
        steered = soft_continuation(model, prompt, expected.size(1))
    right = steered.gather(-1, expected[..., None]).squeeze(-1)
    print(f"the same at 1.0, with noise in the residual stream: {[round(p, 2) for p in right[0].tolist()]}")


if __name__ == "__main__":
    main()
