"use strict";
// The views of classifiers and translators, both updated while typing.

// ---- Labels

let classifying = null;
const classify = safely(async () => {
  classifying?.abort();
  const own = classifying = new AbortController(), started = performance.now();
  const text = find("input").value, empty = !text.trim();
  find("why").disabled = empty || !model.attention;
  find("state").textContent = "";
  if (empty) return find("labels").replaceChildren();
  const {data} = await asked("/v1/classify", {model: model.id, input: text}, own.signal);
  if (own !== classifying) return;
  problem(null);
  const {label: best, probabilities} = data[0];
  find("labels").replaceChildren(...model.labels.map(label => {
    const share = 100 * probabilities[label], bar = make("div");
    bar.style.setProperty("--share", `${share}%`);
    return make("div", `label${label === best ? " best" : ""}`, make("span", "", label),
      make("div", "bar", bar), make("output", "", `${share.toFixed(1)}%`));
  }));
  find("state").textContent = `${Math.round(performance.now() - started)} ms`;
  follow({model: model.id, text});
});
on("input", "input", later(80, refresh));
on("why", "click", () => inspect({model: model.id, text: find("input").value}));
on("label-code", "click", () =>
  showCode("/v1/classify", {model: model.id, input: find("input").value}, '["data"][0]'));

// ---- Translations, updated while typing

// Pieces of text, one for each token, as words: the indices of the tokens of each. A word begins
// where a token does. If there is a single word, its tokens are what can be aligned.
const WORD = /(\s*)(?:[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}]|[\p{L}\p{M}\p{N}]+(?:['’]\p{L}+)*|\S)/gu;
const wordsOf = pieces => {
  const text = pieces.join(""), starts = new Set();
  for (const match of text.matchAll(WORD)) starts.add(match.index).add(match.index + match[1].length);
  const group = begins => {
    const words = [];
    let at = 0;
    pieces.forEach((piece, place) => {
      if (at === text.length) return;  // the end
      if (!words.length || (begins(at) && words.at(-1).text.trim()))
        words.push({tokens: [], text: ""});
      words.at(-1).tokens.push(place);
      words.at(-1).text += piece;
      at += piece.length;
    });
    return words;
  };
  const words = group(at => starts.has(at));
  return words.length > 1 ? words : group(() => true);
};

const total = numbers => numbers.reduce((sum, number) => sum + number, 0);

// A source and its translation. Pointing at a word of one shades the words of the other.
class Pair {
  constructor({source, translation, alignment, notes}) {
    const lines = {source: make("p", "source"), target: make("p", "target")};
    this.about = make("p", "note");
    this.about.setAttribute("role", "status");
    this.about.hidden = !alignment?.length;
    for (const part of alignment || []) this.align(part, lines);
    if (!lines.source.childNodes.length) lines.source.append(source);
    if (!lines.target.childNodes.length) lines.target.append(translation);
    this.request = {model: model.id, text: source};
    const look = button("Inspect", () => inspect(this.request));
    look.hidden = !model.attention;
    this.card = make("article", "pair", make("header", "", make("h2", "", "Source"), look),
      lines.source, make("h2", "", "Translation"), lines.target,
      ...notes.map(note => make("p", "note", note)), this.about);
    for (const line of Object.values(lines))
      line.querySelectorAll(".word").forEach((word, place) => { word.tabIndex = place ? -1 : 0; });
  }

  align({source, target, weights}, lines) {
    const sides = {source: wordsOf(source), target: wordsOf(target)};
    for (const [side, words] of Object.entries(sides)) {
      if (lines[side].childNodes.length) lines[side].append(" ");
      for (const word of words) {
        word.span = part("word", word.text.trim(), () => this.show(word, side, sides), () => this.hide());
        lines[side].append(word.text.match(/^\s*/)[0], word.span, word.text.match(/\s*$/)[0]);
      }
    }
    // The share of a target word's attention that a source word gets.
    sides.share = (word, other) => total(word.tokens.map(row =>
      total(other.tokens.map(column => weights[row][column])))) / word.tokens.length;
  }

  show(word, side, {source, target, share}) {
    this.hide();
    word.span.classList.add("on");
    const shares = side === "target" ? source.map(other => [other, share(word, other)])
      : target.map(other => [other, share(other, word)]);
    for (const [other, share] of shares) other.span.style.setProperty("--share", `${100 * share}%`);
    const best = [...shares].sort((a, b) => b[1] - a[1]).slice(0, 3);
    this.about.textContent = `${word.text.trim()} ${side === "target" ? "←" : "→"} ${best.map(([other, share]) =>
      `${other.text.trim()} ${Math.round(100 * share)}%`).join(", ")}`;
  }

  hide() {
    for (const word of this.card.querySelectorAll(".word")) {
      word.classList.remove("on");
      word.style.removeProperty("--share");
    }
    this.about.textContent = "";
  }
}

let translation = null;
const translationRequest = () =>
  ({model: model.id, text: find("source").value.replace(/\s+$/, "").split("\n"), ...sent(search)});
const translate = safely(async () => {
  translation?.abort();
  const own = translation = new AbortController(), started = performance.now();
  const cards = [...find("pairs").children];
  for (const card of cards) card.classList.add("waiting");
  try {
    const body = {...translationRequest(), alignment: model.attention};
    const {translations} = await asked("/v1/translate", body, own.signal);
    if (own !== translation) return;
    problem(null);
    const pairs = translations.filter(each => each.source.trim()).map(each => new Pair(each));
    find("pairs").replaceChildren(...pairs.map(pair => pair.card));
    find("pace").textContent = pairs.length ? `${Math.round(performance.now() - started)} ms` : "";
    find("aligned").hidden = !find("pairs").querySelector(".word");
    const chosen = pairs.find(pair => pair.request.text === inspected.text) || pairs[0];
    if (chosen) follow(chosen.request);
  } finally {
    if (own === translation) for (const card of cards) card.classList.remove("waiting");
  }
});
for (const id of ["source", "search"]) on(id, "input", later(120, refresh));
on("translate-code", "click", () => showCode("/v1/translate", translationRequest(), '["translations"]'));
