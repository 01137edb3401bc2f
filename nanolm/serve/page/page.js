"use strict";
// The playground. It calls only the API of the server that it was loaded from.

const find = id => document.getElementById(id);
const on = (id, event, call) => find(id).addEventListener(event, call);
const make = (kind, classes = "", ...children) => {
  const element = document.createElement(kind);
  element.className = classes;
  element.append(...children);
  return element;
};

// The API key follows the # in the URL, which browsers never send.
const inHash = new URLSearchParams(location.hash.slice(1)).get("key");
if (inHash) {
  sessionStorage.setItem("key", inHash);
  history.replaceState(null, "", location.pathname);
}
const headers = {"content-type": "application/json"};
const key = sessionStorage.getItem("key");
if (key) headers.authorization = `Bearer ${key}`;

const ask = async (path, body, signal) => {
  const method = body ? "POST" : "GET";
  const answer = await fetch(path, {method, headers, body: JSON.stringify(body), signal});
  if (answer.ok) return answer;
  const error = await answer.json().catch(() => ({error: {message: answer.statusText}}));
  throw new Error(error.error.message);
};
const asked = async (path, body, signal) => (await ask(path, body, signal)).json();

const problem = error => {
  if (error && error.name === "AbortError") return;
  find("problem").textContent = error ? error.message : "";
  find("problem").hidden = !error;
};
// Wraps `call` so that its errors are shown on the page.
const safely = call => async (...given) => {
  try {
    await call(...given);
  } catch (error) {
    problem(error);
  }
};

// Each data line of server-sent events, as JSON.
const events = async function* (answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", shown = performance.now();
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    if (performance.now() - shown > 30) {  // let the browser repaint and handle input
      await new Promise(over => setTimeout(over));
      shown = performance.now();
    }
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines)
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
};

// ---- Sampling parameters

const params = {}, search = {};  // controls of completions and translations by request field

const control = (name, label, about, group, ...inputs) => {
  const row = make("label", "param", make("span", "", label), ...inputs, make("small", "", about));
  row.dataset.name = name;
  row.title = about;
  find(group === params ? "params" : "search").append(row);
  return group[name] = row;
};
// A slider for a field of the OpenAPI document.
const addSlider = (name, field, group) => {
  const {min, max, step, off} = field["x-slider"], first = field.default ?? off;
  const label = name.replaceAll("_", " ");
  const about = field.description + (field.default === null ? ` ${off} turns it off.` : "");
  const slider = make("input"), box = make("input");
  const row = control(name, label, about, group, box, slider);
  Object.assign(slider, {type: "range", min, max, step, value: first});
  Object.assign(box, {type: "number", min, step, value: first});
  slider.setAttribute("aria-label", `${label}: ${about}`);
  slider.addEventListener("input", () => { box.value = slider.value; });
  box.addEventListener("input", () => { slider.value = box.value; });
  row.value = () => box.value === "" ? first : Number(box.value);
  row.sent = () => row.value() === first && field.default === null ? undefined : row.value();
  row.limit = value => {
    slider.max = Math.min(max, value);
    if (row.value() > value) slider.value = box.value = value;
  };
};
const addText = (name, label, hint, about) => {
  const box = make("input");
  Object.assign(box, {type: "text", placeholder: hint, id: `param-${name}`, spellcheck: false});
  control(name, label, about, params, box).value = () => box.value;
};
const addControls = ({components}) => {
  for (const [request, group] of [["CompletionRequest", params], ["TranslateRequest", search]])
    for (const [name, field] of Object.entries(components.schemas[request].properties))
      if (field["x-slider"]) addSlider(name, field, group);
  addText("seed", "seed", "random", "The same seed gives the same text.");
  addText("stop", "stop text", "", "Stop before this text. Type \\n for a newline.");
  addText("ban", "banned text", "", "Never generate this text.");
};

const sent = group => Object.fromEntries(
  Object.entries(group).filter(([, row]) => row.sent).map(([name, row]) => [name, row.sent()]));
const settings = () => {
  const given = sent(params);
  const stop = params.stop.value().replaceAll("\\n", "\n");
  if (stop) given.stop = stop;
  if (params.ban.value()) given.ban = [params.ban.value()];
  // A random seed is chosen here so that the page can show it.
  const seed = params.seed.value().trim();
  if (!/^\d*$/.test(seed)) throw new Error(`seed ${seed}: use a whole number, or nothing for a random one`);
  given.seed = seed === "" ? Math.floor(Math.random() * 1e6) : Number(seed);
  return given;
};

// ---- Tokens and their colors

const STEPS = [0.5, 1, 2, 4, 6, 8, 12];  // upper limit of each color in bits, as in the other pages
const shade = logprob => STEPS.filter(limit => !(-logprob / Math.LN2 <= limit)).length;
const PICTURES = {" ": "·", "\n": "⏎", "\t": "⇥"};
const counted = count => `${count} ${count === 1 ? "token" : "tokens"}`;
const seen = text => [...text].map(letter => PICTURES[letter]
  || (letter < " " ? String.fromCodePoint(0x2400 + letter.codePointAt(0)) : letter)).join("");
const chance = logprob => {
  const value = Math.exp(logprob);
  return value >= 0.0995 ? `${Math.round(100 * value)}%` : `${(100 * value).toPrecision(2)}%`;
};
find("legend").append("probability: ", ...[...STEPS, Infinity].map((bits, step) =>
  make("span", `s${step}`, bits === Infinity ? "lower" : `≥ ${Number((2 ** -bits).toPrecision(2))}`)));

// ---- Generation

let models = [], model = null, controller = null, counting = 0;

class Text {
  // One generated text: the prompt's ids, and the tokens {id, piece, logprob, others}.
  constructor(name, prompt, ids, kept, given) {
    Object.assign(this, {name, prompt, ids, given, tokens: []});
    const look = make("button", "", "Inspect");
    this.about = make("span");
    this.body = make("p", "body", make("b", "", prompt));
    const title = make("div", "", make("b", "", name), this.about);
    this.card = make("article", "text", make("header", "", title, look), this.body);
    look.addEventListener("click", () => inspect({ids: this.whole()}));
    for (const token of kept) this.add(token);
  }

  whole() { return [...this.ids, ...this.tokens.map(token => token.id)]; }

  add(token) {
    const place = this.tokens.push(token) - 1;
    const span = make("span", `token s${shade(token.logprob)}`);
    for (const line of token.piece.split(/(?<=\n)/)) {
      if (line.endsWith("\n")) span.append(line.slice(0, -1), make("i", "", "⏎"), "\n");
      else span.append(line);
    }
    span.tabIndex = place ? -1 : 0;
    span.setAttribute("role", "button");
    for (const event of ["mouseenter", "focus", "click"])
      span.addEventListener(event, () => others.open(this, place, span));
    span.addEventListener("mouseleave", () => others.leave());
    span.addEventListener("keydown", event => {
      const next = {ArrowRight: span.nextSibling, ArrowLeft: span.previousSibling}[event.key];
      const inside = ["Enter", " ", "ArrowDown"].includes(event.key);
      if (next?.classList.contains("token")) next.focus();
      else if (inside) others.box.querySelector("button")?.focus();
      else return;
      event.preventDefault();
    });
    this.body.append(span);
  }

  say(text) { this.about.textContent = text; }
}

const busy = on => {
  find("stop").disabled = !on;
  find("write").disabled = on;
  controller = on ? new AbortController() : null;
};

// Stream completions of `ids` into `texts`.
const write = async (texts, ids, given) => {
  problem(null);
  others.close();
  find("legend").hidden = false;
  find("hint").hidden = true;
  const started = performance.now();
  let count = 0, said = "stopped";
  try {
    const body = {model: model.id, prompt: ids, stream: true, logprobs: 6, ...given};
    for await (const part of events(await ask("/v1/completions", body, controller.signal))) {
      if (part.error) throw new Error(part.error.message);
      const choice = part.choices[0], text = texts[choice.index], found = choice.logprobs;
      const letters = [...choice.text], first = found.text_offset[0] || 0;
      found.ids.forEach((id, place) => {
        const end = (found.text_offset[place + 1] ?? Infinity) - first;
        const piece = letters.slice(found.text_offset[place] - first, end).join("");
        text.add({id, piece, name: found.tokens[place], logprob: found.token_logprobs[place],
          others: found.alternatives[place]});
        count++;
      });
      const speed = `${Math.round(count / (performance.now() - started) * 1000)} tokens/s`;
      find("status").textContent = speed;
      const why = {stop: "finished", length: "token limit reached"}[choice.finish_reason];
      if (why) text.done = true;
      text.say(`${counted(text.tokens.length)}${why ? `, ${why}` : ""}, seed ${given.seed}`);
      said = speed;
    }
  } catch (error) {
    problem(error);
    if (error.name !== "AbortError") said = "";
  }
  for (const text of texts) if (!text.done) text.say(`${counted(text.tokens.length)}, stopped, seed ${given.seed}`);
  find("status").textContent = said;
  busy(false);
};

const start = async () => {
  if (controller) return;
  problem(null);
  const text = find("prompt").value;
  busy(true);
  try {
    const given = settings();
    const {ids} = await asked("/v1/tokenize", {model: model.id, text}, controller.signal);
    const texts = Array.from({length: given.n}, (_, place) =>
      new Text(`Text ${place + 1}`, text, ids, [], given));
    find("texts").replaceChildren(...texts.map(text => text.card));
    await write(texts, ids, given);
  } catch (error) {
    problem(error);
    busy(false);
  }
};

const branch = async (from, place, other) => {
  controller?.abort();
  while (controller) await new Promise(done => setTimeout(done, 10));
  const given = {...from.given, n: 1};
  given.max_tokens = Math.max(1, given.max_tokens - place - 1);
  delete given.min_tokens;
  const drawn = {...from.tokens[place], ...other, piece: other.token, name: other.token};
  const text = new Text(`${from.name}, branched at token ${place + 1}`, from.prompt, from.ids,
    [...from.tokens.slice(0, place), drawn], from.given);
  from.card.after(text.card);
  busy(true);
  await write([text], text.whole(), given);
};

// ---- Alternative tokens

const others = {
  box: find("others"), timer: 0, from: null,

  open(text, place, span) {
    clearTimeout(this.timer);
    if (this.from === span && !this.box.hidden) return;
    this.close();
    this.from = span;
    span.classList.add("on");
    const token = text.tokens[place];
    const about = make("p", "", make("b", "", seen(token.name)),
      ` token ${token.id}, ${chance(token.logprob)}`);
    const rows = token.others.map(other => {
      const row = make("button", `other${other.id === token.id ? " came" : ""}`,
        make("span", "", seen(other.token)), make("span", "", chance(other.logprob)));
      row.style.setProperty("--share", `${100 * Math.exp(other.logprob)}%`);
      row.title = `token ${other.id}: continue from here with this token`;
      row.addEventListener("click", () => branch(text, place, other));
      return row;
    });
    this.box.replaceChildren(about, ...rows);
    this.box.hidden = false;
    const spot = span.getClientRects()[span.getClientRects().length - 1] || span.getBoundingClientRect();
    const most = document.documentElement.clientWidth - this.box.offsetWidth - 8;
    this.box.style.left = `${Math.max(8, Math.min(spot.left, most)) + scrollX}px`;
    const below = spot.bottom + this.box.offsetHeight < innerHeight;
    this.box.style.top = `${(below ? spot.bottom : spot.top - this.box.offsetHeight) + scrollY}px`;
  },
  leave() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.close(), 250);
  },
  close() {
    this.from?.classList.remove("on");
    this.box.hidden = true;
  },
};
on("others", "mouseenter", () => clearTimeout(others.timer));
on("others", "mouseleave", () => others.leave());
on("others", "keydown", event => {
  const step = {ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling"}[event.key];
  if (!step) return;
  event.preventDefault();
  const next = document.activeElement[step];
  if (next?.tagName === "BUTTON") next.focus();
});
document.addEventListener("click", event => {
  if (!event.target.closest("#others, .token")) others.close();
});

// ---- Tokens of the prompt, updated while typing

const later = (wait, call) => {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(call, wait);
  };
};
const countTokens = safely(async () => {
  const turn = ++counting;
  const {ids, tokens} = await asked("/v1/tokenize", {model: model.id, text: find("prompt").value});
  if (turn !== counting) return;
  find("count").textContent = `${ids.length.toLocaleString("en")} token${ids.length === 1 ? "" : "s"}`;
  find("tokens").replaceChildren(...ids.slice(0, 2000).map((id, place) =>
    make("span", "", seen(tokens[place]), make("small", "", id))));
});

// ---- Labels

let classifying = null;
const classify = safely(async () => {
  classifying?.abort();
  const own = classifying = new AbortController(), started = performance.now();
  const body = {model: model.id, input: find("input").value};
  const {data} = await asked("/v1/classify", body, own.signal);
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
});

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
    const look = make("button", "", "Inspect");
    look.hidden = !model.attention;
    look.addEventListener("click", () => inspect({text: source}));
    this.card = make("article", "pair", make("header", "", make("h3", "", "Source"), look),
      lines.source, make("h3", "", "Translation"), lines.target,
      ...notes.map(note => make("p", "note", note)), this.about);
    for (const line of Object.values(lines))
      line.querySelectorAll(".word").forEach((word, place) => { word.tabIndex = place ? -1 : 0; });
  }

  align({source, target, weights}, lines) {
    const sides = {source: wordsOf(source), target: wordsOf(target)};
    for (const [side, words] of Object.entries(sides)) {
      if (lines[side].childNodes.length) lines[side].append(" ");
      for (const word of words) {
        word.span = make("span", "word", word.text.trim());
        word.span.setAttribute("role", "button");
        lines[side].append(word.text.match(/^\s*/)[0], word.span, word.text.match(/\s*$/)[0]);
      }
    }
    // The share of a target word's attention that a source word gets.
    const share = (word, other) => total(word.tokens.map(row =>
      total(other.tokens.map(column => weights[row][column])))) / word.tokens.length;
    for (const word of sides.target)
      this.listen(word, "←", () => sides.source.map(other => [other, share(word, other)]));
    for (const word of sides.source)
      this.listen(word, "→", () => sides.target.map(other => [other, share(other, word)]));
  }

  listen(word, arrow, shares) {
    for (const event of ["mouseenter", "focus", "click"])
      word.span.addEventListener(event, () => this.show(word, arrow, shares()));
    for (const event of ["mouseleave", "blur"]) word.span.addEventListener(event, () => this.hide());
    word.span.addEventListener("keydown", event => {
      const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
      if (!step) return;
      const words = [...word.span.parentNode.querySelectorAll(".word")];
      words[words.indexOf(word.span) + step]?.focus();
      event.preventDefault();
    });
  }

  show(word, arrow, shares) {
    this.hide();
    word.span.classList.add("on");
    for (const [other, share] of shares) other.span.style.setProperty("--share", `${100 * share}%`);
    const best = [...shares].sort((a, b) => b[1] - a[1]).slice(0, 3);
    this.about.textContent = `${word.text.trim()} ${arrow} ${best.map(([other, share]) =>
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
const translate = safely(async () => {
  translation?.abort();
  const own = translation = new AbortController(), started = performance.now();
  const text = find("source").value.replace(/\s+$/, "").split("\n");
  const cards = [...find("pairs").children];
  for (const card of cards) card.classList.add("waiting");
  try {
    const body = {model: model.id, text, alignment: model.attention, ...sent(search)};
    const {translations} = await asked("/v1/translate", body, own.signal);
    if (own !== translation) return;
    problem(null);
    const shown = translations.filter(each => each.source.trim());
    find("pairs").replaceChildren(...shown.map(each => new Pair(each).card));
    find("pace").textContent = `${Math.round(performance.now() - started)} ms`;
    find("aligned").hidden = !find("pairs").querySelector(".word");
  } finally {
    if (own === translation) for (const card of cards) card.classList.remove("waiting");
  }
});

// ---- Inside the model

let inspected = {}, view = "attention";  // the text, and how it is shown: as attention or as a walk
let opener = null;  // the button that opened the section; gets the focus back
const inspect = safely(async (given, wanted = view) => {
  problem(null);
  const shown = model.kind !== "language model" ? "attention" : model.attention ? wanted : "walk";
  if (!find("inside").contains(document.activeElement)) opener = document.activeElement;
  const {page} = await asked(shown === "walk" ? "/v1/walk" : "/v1/inspect", {model: model.id, ...given});
  [inspected, view] = [given, wanted];
  find("look").src = page;
  find("views").hidden = model.kind !== "language model" || !model.attention;
  for (const name of ["attention", "walk"]) find(name).setAttribute("aria-pressed", name === shown);
  find("inside").hidden = false;
  find("inside").scrollIntoView({behavior: "smooth"});
});

// ---- Models

const choose = name => {
  controller?.abort();
  translation?.abort();
  model = models.find(each => each.id === name);
  const number = value => value.toLocaleString("en");
  find("facts").textContent = `${model.kind} · ${number(model.parameters)} parameters · `
    + `context ${number(model.context)} · vocabulary ${number(model.vocabulary)}`;
  const views = {"language model": "writing", classifier: "labeling", translator: "translating"};
  for (const [kind, id] of Object.entries(views)) find(id).hidden = kind !== model.kind;
  const hidden = {inside: true, why: !model.attention, legend: true, hint: false};
  for (const [id, value] of Object.entries(hidden)) find(id).hidden = value;
  for (const id of ["texts", "pairs"]) find(id).replaceChildren();
  find("status").textContent = "";
  others.close();
  problem(null);
  for (const name of ["max_tokens", "min_tokens"]) params[name].limit(model.max_tokens);
  ({"language model": countTokens, classifier: classify, translator: translate})[model.kind]();
};

on("ask", "submit", event => {
  event.preventDefault();
  start();
});
on("stop", "click", () => controller?.abort());
on("prompt", "input", later(150, countTokens));
on("input", "input", later(80, classify));
on("source", "input", later(120, translate));
on("search", "input", later(120, translate));
on("why", "click", () => inspect({text: find("input").value}));
for (const name of ["attention", "walk"]) on(name, "click", () => inspect(inspected, name));
on("close", "click", () => {
  find("inside").hidden = true;
  opener?.focus();
});
on("model", "change", () => choose(find("model").value));
document.addEventListener("keydown", event => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !find("writing").hidden) start();
  if (event.key !== "Escape") return;
  if (!others.box.hidden) {
    others.from?.focus();
    others.close();
  } else controller?.abort();
});

safely(async () => {
  addControls(await asked("/openapi.json"));
  models = (await asked("/v1/models")).data;
  find("model").replaceChildren(...models.map(each => new Option(each.id)));
  if (innerWidth < 832) find("more").open = find("options").open = false;
  choose(models[0].id);
  document.body.dataset.ready = "yes";
})();
