"""The pages, figures and JSON of `nanolm inspect`."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nanolm.cli.columns import visible, visible_text
from nanolm.cli.console import note, note_written, print_json, write_page
from nanolm.errors import UsageError
from nanolm.files import replacing
from nanolm.formats import printable
from nanolm.text import spelled

if TYPE_CHECKING:
    from nanolm.classification.classifier import TextClassifier
    from nanolm.generation.language_model import LanguageModel
    from nanolm.inspect.attribution import Attribution
    from nanolm.inspect.inspection import Inspection
    from nanolm.model.base import Network
    from nanolm.pairs.translator import Translator
    from nanolm.text.tokenizer import Tokenizer

MOST_TOKENS = 512  # per page; attention grows quadratically
MASKED_SCORE = -1e9  # JSON has no infinity


class Inspector:
    def __init__(self, run: str, out: Path, png: Path | None, as_json: bool) -> None:
        self.run, self.out, self.png, self.as_json = run, out, png, as_json

    def text(self, loaded: "LanguageModel", text: str, head: str | None, top: int) -> None:
        from nanolm.inspect.inspection import inspect_text
        from nanolm.inspect.png import predictions_png

        ids = cut(loaded.tokenizer.encode_prompt(text), loaded.model.window())
        inspection = inspect_text(loaded.model, ids, top)
        self.attention(loaded.tokenizer, inspection, head)
        self.draw("predictions.png", predictions_png, inspection, partial(shown, loaded.tokenizer))

    def walk(self, loaded: "LanguageModel", text: str) -> None:
        from nanolm.inspect.walk import walk_window

        ids = cut(loaded.tokenizer.encode_prompt(text), walk_window(loaded.model))
        self.walk_through(loaded.model, loaded.tokenizer, ids)

    def translation_walk(self, translator: "Translator", text: str) -> None:
        """Translate the beginning of a text, and show how each token was predicted."""
        from nanolm.inspect.walk import walk_window

        tokenizer, encoder = translator.tokenizer, translator.encoder
        window = walk_window(translator.model)
        part = encoder.decode(cut(encoder.encode(text.strip()), window - 1))
        translation = translator.translate(part)
        tokens = [id for id in translation.tokens if id not in tokenizer.stops]
        ids = cut([tokenizer.start_of_text, *tokens], window)
        source = [*encoder.encode(part)[: window - 1], encoder.end_of_text]
        self.walk_through(translator.model, tokenizer, ids, source, encoder)

    def walk_through(
        self,
        model: "Network",
        tokenizer: "Tokenizer",
        ids: list[int],
        source: list[int] | None = None,
        encoder: "Tokenizer | None" = None,
    ) -> None:
        from nanolm.inspect.walk import walk_through
        from nanolm.inspect.walk_page import walk_page

        walk = walk_through(model, ids, source)
        if self.as_json:
            tokens = {"tokens": names(tokenizer, ids)}
            tokens |= {"source_tokens": names(encoder or tokenizer, source)} if source else {}
            stages = [
                {
                    "stage": stage.role,
                    **({"side": stage.side} if stage.side else {}),
                    **({"layer": stage.layer} if stage.layer else {}),
                    "values": rounded(stage.values.clamp(min=MASKED_SCORE)),
                }
                for stage in walk.stages
            ]
            print_json({"model": self.run, **tokens, "stages": stages})
            return
        write_page(self.out, walk_page(tokenizer, walk, {"model": self.run}, encoder))

    def attribution(self, classifier: "TextClassifier", text: str, head: str | None) -> None:
        from nanolm.inspect.attribution import attribute
        from nanolm.inspect.inspection import Inspection

        if classifier.ngrams:
            note(
                f"this shows only the Transformer; `nanolm classify {self.run}` adds n-gram scores"
            )
        model, tokenizer = classifier.model, classifier.tokenizer
        window = min(model.base.window() or MOST_TOKENS, model.config.window or MOST_TOKENS)
        attribution = attribute(model, ids := cut(tokenizer.encode_prompt(text.strip()), window))
        inspection = Inspection(ids, attribution.attention, [])
        decision = attribution, classifier.labels
        self.attention(tokenizer, inspection, head, decision, bool(classifier.ngrams))

    def attention(
        self,
        tokenizer: "Tokenizer",
        inspection: "Inspection",
        head: str | None,
        decision: "tuple[Attribution, tuple[str, ...]] | None" = None,
        without_ngrams: bool = False,
    ) -> None:
        """The attention of each head, with layer predictions or a classifier's attribution."""
        from nanolm.inspect.heads import describe_heads
        from nanolm.inspect.page import WITHOUT_NGRAMS, inspection_page
        from nanolm.inspect.png import attention_png, head_png

        heads = describe_heads(inspection.attention, inspection.ids)
        chosen = chosen_head(head, len(heads), len(heads[0]))
        if self.as_json:
            values: dict[str, Any] = {"model": self.run, "tokens": names(tokenizer, inspection.ids)}
            values |= {"ngrams": False} if without_ngrams else {}
            if decision:
                attribution, labels = decision
                probabilities = rounded(attribution.probabilities)
                values["label"] = labels[attribution.label]
                values["probabilities"] = dict(zip(labels, probabilities, strict=True))
                values["rollout"] = rounded(attribution.rollout)
                values["gradient_x_input"] = rounded(attribution.gradient)
            values["heads"] = [[asdict(h) | {"words": h.words} for h in row] for row in heads]
            values["attention"] = rounded(inspection.attention)
            layers = [
                {
                    "tokens": [names(tokenizer, row) for row in layer.ids.tolist()],
                    "probabilities": rounded(layer.probabilities),
                    "came": rounded(layer.actual),
                    "rank": layer.rank.tolist(),
                }
                for layer in inspection.layers
            ]
            if layers:
                values |= {"predictions": layers[-1], "layers": layers}
            print_json(values)
        else:
            facts = {"model": self.run, "tokens": f"{len(inspection.ids):,}"}
            facts |= WITHOUT_NGRAMS if without_ngrams else {}
            page = inspection_page(tokenizer, inspection, heads, facts, chosen, decision)
            write_page(self.out, page)
        self.draw("attention.png", attention_png, inspection, heads)
        if chosen is not None:
            title = f"head {head} {heads[chosen[0]][chosen[1]].words}"
            spelled = shown(tokenizer, inspection.ids)
            weights = inspection.attention[chosen]
            self.draw(f"head-{head}.png", head_png, weights, title, spelled, spelled)

    def alignment(self, translator: "Translator", text: str, head: str | None) -> None:
        """Translate a text, and show which source tokens each target token attended to."""
        import numpy as np

        from nanolm.inspect.page import alignment_page
        from nanolm.inspect.png import head_png

        source, *rest = translator.cut(text) or [""]
        if rest:
            note(f"truncated to the first {len(source):,} of {len(text):,} characters")
        translation = translator.translate(source)
        alignment = translator.alignment(source, translation.tokens)
        if not alignment.weights:
            raise UsageError(
                f"{self.run} has no attention over its source, so there is no alignment to show"
            )
        weights = np.stack([layer.numpy() for layer in alignment.weights])
        chosen = chosen_head(head, *weights.shape[:2])
        mean = weights.mean(axis=(0, 1))  # (target, source)
        sources, targets = alignment.source_tokens, alignment.target_tokens
        texts = {"source": source, "translation": translation.text}
        if self.as_json:
            tokens = {"source_tokens": sources, "target_tokens": targets}
            numbers = {"attention": rounded(weights), "mean": rounded(mean)}
            print_json({"model": self.run, **texts, **tokens, **numbers})
        else:
            facts = {"model": self.run, **texts}
            write_page(self.out, alignment_page(weights, sources, targets, facts, chosen))
        rows, columns = ([*map(visible_text, side)] for side in (targets, sources))
        self.draw("alignment.png", head_png, mean, "average of all heads", rows, columns)
        if chosen is not None:
            drawn = (weights[chosen], f"head {head}", rows, columns)
            self.draw(f"head-{head}.png", head_png, *drawn)

    def word(self, loaded: "LanguageModel", word: str, texts: list[str]) -> None:
        from nanolm.inspect.page import word_page
        from nanolm.inspect.png import matrices_png
        from nanolm.inspect.vectors import mean_similarities, occurrences, similarities

        places = occurrences(loaded.model, loaded.tokenizer, word, texts)
        cosines = similarities(places.vectors)
        if self.as_json:
            values = {"word": word, "places": places.contexts, "cosines": rounded(cosines)}
            print_json({"model": self.run, **values, "means": rounded(mean_similarities(cosines))})
        else:
            write_page(self.out, word_page(places, {"model": self.run}))
        titles = ["embedding", *(f"after layer {n}" for n in range(1, len(cosines)))]
        self.draw("word.png", matrices_png, list(zip(titles, cosines, strict=True)))

    def neighbours(self, loaded: "LanguageModel", word: str, page: bool) -> None:
        from nanolm.inspect.vectors import neighbours, token_of

        id = token_of(loaded.tokenizer, word)
        others, cosines = zip(*neighbours(loaded.model, id), strict=True)
        token, *near = names(loaded.tokenizer, [id, *others])
        if self.as_json:
            pairs = zip(near, cosines, strict=True)
            values = [{"token": text, "cosine": round(cosine, 6)} for text, cosine in pairs]
            print_json({"model": self.run, "token": token, "neighbours": values})
            return
        if page:
            from nanolm.inspect.page import neighbours_page

            ids, facts = [id, *others], {"model": self.run}
            vectors = loaded.model.token_embedding.weight.detach()[ids].float().cpu().numpy()
            labels = shown(loaded.tokenizer, ids)
            write_page(self.out, neighbours_page(labels, vectors, cosines, facts))
            return
        for text, cosine in zip(near, cosines, strict=True):
            click.echo(f"{cosine:6.3f}  {printable(text)}")

    def positions(self, loaded: "LanguageModel") -> None:
        from nanolm.inspect.page import positions_page
        from nanolm.inspect.png import matrices_png
        from nanolm.inspect.vectors import position_vectors, similarities

        kind, vectors = position_vectors(loaded.model)
        if self.as_json:
            print_json({"model": self.run, "kind": kind, "vectors": rounded(vectors)})
        else:
            facts = {"model": self.run, "positions": f"{len(vectors):,}"}
            write_page(self.out, positions_page(kind, vectors, facts))
        largest = float(abs(vectors).max()) or 1.0
        pairs = [(kind, vectors / largest), ("cosines", similarities(vectors))]
        self.draw("positions.png", matrices_png, pairs, "auto")

    def draw(self, name: str, draw: Callable[..., None], *arguments: Any) -> None:
        if self.png is not None:
            self.png.mkdir(parents=True, exist_ok=True)
            with replacing(self.png / name) as temporary:
                draw(temporary, *arguments)
            note_written(self.png / name)


def chosen_head(head: str | None, layers: int, heads: int) -> tuple[int, int] | None:
    """Layer and head, counted from 0."""
    if head is None:
        return None
    layer, number = (int(part) - 1 for part in head.split("."))
    if layer >= layers or number >= heads:
        raise UsageError(f"--head {head}: the last head is {layers}.{heads}")
    return layer, number


def cut(ids: list[int], window: int | None) -> list[int]:
    """The first tokens, truncated to the limits of the model and the page."""
    most = min(MOST_TOKENS, window or MOST_TOKENS)
    if len(ids) > most:
        note(f"truncated to the first {most:,} of {len(ids):,} tokens")
    return ids[:most]


def names(tokenizer: "Tokenizer", ids: list[int]) -> list[str]:
    return [tokenizer.special.get(id) or spelled(tokenizer.tokens[id]) for id in ids]


def shown(tokenizer: "Tokenizer", ids: list[int]) -> list[str]:
    return [visible(tokenizer, id) for id in ids]


def rounded(values: Any) -> Any:
    import numpy as np

    return np.round(np.asarray(values, dtype=np.float64), 7).tolist()
