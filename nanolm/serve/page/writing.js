"use strict";
// The view of language models: texts and their tokens, alternatives to each, and the history of this
// tab.

const STEPS = [0.5, 1, 2, 4, 6, 8, 12];  // upper limit of each color in bits, as in the other pages
const shade = logprob => STEPS.filter(limit => !(-logprob / Math.LN2 <= limit)).length;
const PICTURES = {" ": "·", "\n": "⏎", "\t": "⇥"};
const counted = count => `${count.toLocaleString("en")} ${count === 1 ? "token" : "tokens"}`;
const seen = text => [...text].map(letter => PICTURES[letter]
  || (letter < " " ? String.fromCodePoint(0x2400 + letter.codePointAt(0)) : letter)).join("");
const percent = share => share < 1e-5 && share ? "<0.001%"
  : `${share >= 0.0995 || !share ? Math.round(100 * share) : (100 * share).toPrecision(2)}%`;

const writers = () => models.filter(each => each.kind === "language model");
// The models to generate with: the chosen one and, if wanted, another beside it.
const compared = () => [...new Set([model.id, find("rival").value || model.id])];

const settings = () => {
  const given = sent(params), {seed, stop, ban} = fields;
  if (stop.value) given.stop = stop.value.replaceAll("\\n", "\n");
  if (ban.value) given.ban = [ban.value];
  const number = seed.value.trim();
  if (!/^\d*$/.test(number))
    throw new Error(`seed ${number}: use a whole number, or leave it empty for a random seed`);
  // A random seed is chosen here so that the page can show it.
  given.seed = number === "" ? Math.floor(Math.random() * 1e6) : Number(number);
  if (!(given.n >= 1)) throw new Error(`n ${given.n}: use at least 1`);
  return given;
};

// ---- A generated text

class Text {
  // The prompt's ids, and the tokens {id, piece, name, logprob, others}. The first `first` of them were
  // given: those shared with another text, and the one that was chosen instead of its next. `forks` are
  // the places where other texts branched off.
  constructor({name, model, index, prompt, ids, given, first = 0, forks = [], tokens = [], about = ""}) {
    Object.assign(this, {name, model, index, prompt, ids, given, first, forks, tokens: []});
    this.about = make("span", "", about);
    this.body = make("p", "body", make("b", "", prompt));
    const buttons = make("div", "",
      button("Inspect", () => this.choose(inspect)),
      button("Copy", clicked => copy(prompt + this.tokens.map(token => token.piece).join(""), clicked)),
      button("Code", () => showCode("/v1/completions", this.request, `["choices"][${index}]["text"]`)));
    this.card = make("article", "text",
      make("header", "", make("div", "", make("b", "", name), this.about), buttons), this.body);
    this.body.addEventListener("click", () => this.choose(follow));
    for (const token of tokens) this.add(token);
  }

  toJSON() { return {...this, card: undefined, body: undefined, about: this.about.textContent}; }

  whole(end = Infinity) { return [...this.ids, ...this.tokens.slice(0, end).map(token => token.id)]; }

  get request() {
    return {model: this.model, prompt: this.first ? this.whole(this.first) : this.prompt, ...this.given};
  }

  choose(look) {  // `look` is inspect or follow
    for (const card of find("texts").querySelectorAll(".text")) card.classList.toggle("on", card === this.card);
    look({model: this.model, ids: this.whole()});
  }

  add(token) {
    const place = this.tokens.push(token) - 1;
    const span = part(`token s${shade(token.logprob)}`, place === this.first - 1 ? make("i", "", "↳") : "",
      (span, pin) => others.open(this, place, span, pin), () => others.leave());
    span.append(...token.piece.split(/(?=\n)|(?<=\n)/).flatMap(line =>
      line === "\n" ? [make("i", "", "⏎"), line] : line));
    span.tabIndex = place ? -1 : 0;
    this.body.append(span);
    this.label(place, span);
  }

  // The label has the probability, and says where texts branch off.
  label(place, span = this.body.querySelectorAll(".token")[place]) {
    const {name, logprob} = this.tokens[place];
    const fork = this.forks.includes(place) ? ", a branch leaves here"
      : place === this.first - 1 ? ", branched here" : "";
    span.classList.toggle("fork", fork);
    span.setAttribute("aria-label", `${seen(name)} ${percent(Math.exp(logprob))}${fork}`);
  }

  say(why) {
    this.about.textContent = `${counted(this.tokens.length)}${why && `, ${why}`}, seed ${this.given.seed}`;
  }
}

// ---- Generation

let controller = null, counting = 0;
const busy = on => {
  find("stop").disabled = !on;
  find("write").disabled = on;
  controller = on ? new AbortController() : null;
};

// Stream the completions of one request into `texts`.
const stream = async (texts, progress) => {
  const body = {...texts[0].request, prompt: texts[0].whole(), stream: true, logprobs: 6};
  try {
    for await (const part of events(await ask("/v1/completions", body, controller.signal))) {
      if (part.error) throw new Error(part.error.message);
      const choice = part.choices[0], text = texts[choice.index], found = choice.logprobs;
      const letters = [...choice.text], first = found.text_offset[0] || 0;
      found.ids.forEach((id, place) => {
        const end = (found.text_offset[place + 1] ?? Infinity) - first;
        const piece = letters.slice(found.text_offset[place] - first, end).join("");
        text.add({id, piece, name: found.tokens[place], logprob: found.token_logprobs[place],
          others: found.alternatives[place]});
        progress.count++;
      });
      const speed = 1000 * progress.count / (performance.now() - progress.started);
      find("status").textContent = `${Math.round(speed)} tokens/s`;
      const why = {stop: "finished", length: "token limit reached"}[choice.finish_reason];
      if (why) text.done = true;
      text.say(why || "");
    }
  } catch (error) {
    problem(error);
    find("status").textContent = "stopped";
  }
  for (const text of texts) if (!text.done) text.say("stopped");
};
// Stream several requests at the same time.
const write = async (...requests) => {
  const progress = {started: performance.now(), count: 0};
  find("status").textContent = "";
  await Promise.all(requests.map(texts => stream(texts, progress)));
  busy(false);
  keep();
  if (requests[0][0].card.isConnected && !find("writing").hidden) requests[0][0].choose(follow);
};

const start = async () => {
  if (controller) return;
  problem(null);
  busy(true);
  try {
    const given = settings(), prompt = find("prompt").value;
    const requests = await Promise.all(compared().map(async model => {
      const {ids} = await asked("/v1/tokenize", {model, text: prompt}, controller.signal);
      return Array.from({length: given.n}, (_, index) =>
        new Text({name: `Text ${index + 1}`, model, index, prompt, ids, given}));
    }));
    show(visits[visits.push(requests.flat()) - 1]);
    await write(...requests);
  } catch (error) {
    problem(error);
    busy(false);
  }
};

const branch = async (from, place, other) => {
  controller?.abort();
  while (controller) await new Promise(done => setTimeout(done, 10));
  problem(null);
  others.close();
  const given = {...from.given, n: 1};
  given.max_tokens = Math.max(1, given.max_tokens + from.first - place - 1);
  delete given.min_tokens;
  const drawn = {...from.tokens[place], ...other, piece: other.token, name: other.token};
  const text = new Text({...from, name: `${from.name}, branched at token ${place + 1}`, index: 0, given,
    first: place + 1, forks: [], tokens: [...from.tokens.slice(0, place), drawn], about: ""});
  from.forks.push(place);
  from.label(place);
  from.card.after(text.card);
  const texts = visits.find(texts => texts.includes(from));
  texts.splice(texts.indexOf(from) + 1, 0, text);
  busy(true);
  await write([text]);
};

// ---- The history of this tab: the texts of each request, in the browser's session storage

const visits = [];  // oldest first; texts are plain data until they are shown
let oldest = 0;  // of those that fit in the session storage
const keep = () => {
  try {
    sessionStorage.setItem("visits", JSON.stringify(visits.slice(oldest)));
  } catch {  // full
    if (++oldest < visits.length) keep();
  }
};
const show = texts => {
  texts.forEach((text, place) => { if (!text.card) texts[place] = new Text(text); });
  const names = [...new Set(texts.map(text => text.model))];
  find("texts").replaceChildren(...names.map(name => make("div", "column",
    ...writers().length > 1 ? [make("h2", "", name)] : [],
    ...texts.filter(text => text.model === name).map(text => text.card))));
  find("legend").hidden = find("visits").hidden = false;
  find("hint").hidden = true;
  others.close();
  find("history").replaceChildren(...visits.map(each => {
    const [{prompt, model: name, given}] = each;
    const entry = button(prompt.trim().slice(0, 60) || "no prompt", () => recall(each));
    entry.append(make("small", "", `${name}, temperature ${given.temperature}, seed ${given.seed}`));
    entry.setAttribute("aria-current", each === texts);
    return make("li", "", entry);
  }).reverse());
};
// Show earlier texts, with their prompt and settings.
const recall = texts => {
  const {prompt, given, model: name} = texts[0], last = texts.at(-1).model;
  if (name !== model.id) choose(name);
  const values = {...given, stop: given.stop?.replaceAll("\n", "\\n"), prompt, rival: last === name ? "" : last};
  for (const each of ["prompt", "rival", "seed", "stop", "ban", ...Object.keys(params)])
    fill(fields[each], values[each] ?? fields[each].defaultValue);
  show(texts);
};
addEventListener("pagehide", keep);

// ---- Alternative tokens

const others = {
  box: find("others"), timer: 0, from: null, rows: [], pinned: false,

  // A click, a tap or the focus pins the list until the next one. Otherwise it follows the mouse, which
  // may be parked somewhere while one taps.
  open(text, place, span, pin) {
    if (this.pinned && !pin) return;
    clearTimeout(this.timer);
    this.pinned = pin;
    if (this.from === span && !this.box.hidden) return;
    this.from?.classList.remove("on");
    span.classList.add("on");
    const {id, name, logprob, others} = text.tokens[place];
    const rows = others.map(other => {
      const row = button("", () => branch(text, place, other)), share = Math.exp(other.logprob);
      row.className = `other${other.id === id ? " came" : ""}`;
      row.append(make("span", "", seen(other.token)), make("span", "", percent(share)), make("span"));
      row.style.setProperty("--share", `${100 * share}%`);
      row.title = `token ${other.id}: continue from here with this token`;
      row.token = other.id;
      return row;
    });
    Object.assign(this, {from: span, text, place, rows, about: make("p", "now", "…")});
    this.box.replaceChildren(
      make("p", "", make("b", "", seen(name)), ` token ${id}, ${percent(Math.exp(logprob))}`),
      make("p", "key", make("span", "", "model"), make("span", "", "sampled")), ...rows, this.about);
    this.box.hidden = false;
    const {left, top, bottom} = [...span.getClientRects()].at(-1), {offsetWidth, offsetHeight} = this.box;
    const most = document.documentElement.clientWidth - offsetWidth - 8, below = bottom + offsetHeight < innerHeight;
    this.box.style.left = `${Math.max(8, Math.min(left, most)) + scrollX}px`;
    this.box.style.top = `${(below ? bottom : top - offsetHeight) + scrollY}px`;
    this.update();
  },
  // Show the probabilities with the parameters as they are now, by one request at a time.
  async update() {
    this.stale = true;
    if (this.asking) return;
    this.asking = true;
    while (this.stale && !this.box.hidden) {
      await new Promise(done => setTimeout(done, 50));  // not for each token that the mouse passes
      this.stale = false;
      const {text, place, rows, about} = this, given = place < text.first ? 0 : text.first;
      try {
        const {ids, sampled, candidates} = await asked("/v1/probabilities", {...settings(), model: text.model,
          prompt: text.whole(place), generated: place - given, logprobs: rows.length});
        for (const row of rows) {
          const share = sampled[ids.indexOf(row.token)] || 0;
          row.style.setProperty("--now", `${100 * share}%`);
          row.lastChild.textContent = percent(share);
        }
        about.textContent = `Sampled from ${counted(candidates)} with the current settings.`;
      } catch (error) {
        about.textContent = error.message;
      }
    }
    this.asking = false;
  },
  leave() {
    clearTimeout(this.timer);
    if (!this.pinned) this.timer = setTimeout(() => this.close(), 250);
  },
  close() {
    this.from?.classList.remove("on");
    this.box.hidden = true;
    this.pinned = false;
  },
};
on("others", "mouseenter", () => clearTimeout(others.timer));
on("others", "mouseleave", () => others.leave());
for (const id of ["texts", "others"])
  on(id, "keydown", event => {
    const at = others.rows.indexOf(event.target), keys = at < 0 ? ["ArrowDown", "Enter", " "] : ["ArrowDown"];
    const step = keys.includes(event.key) ? 1 : event.key === "ArrowUp" ? -1 : 0;
    if (!step || !event.target.matches(".token, .other")) return;
    others.rows[at + step]?.focus();
    event.preventDefault();
  });
find("params").addEventListener("input", () => others.update(), true);
for (const kind of ["click", "focusin"])
  document.addEventListener(kind, event => {
    if (!event.target.closest("#others, #params, .token")) others.close();
  });

// ---- The prompt

const offer = () => {
  find("compare").hidden = model.kind !== "language model" || writers().length < 2;
  find("prompts").hidden = !model.prompts.length;
  find("prompts").replaceChildren("Try a prompt from this model's own samples:", ...model.prompts.map(prompt =>
    button(prompt, () => {
      fill(find("prompt"), prompt);
      start();
    })));
};

const countTokens = safely(async () => {
  const turn = ++counting, text = find("prompt").value;
  const found = await Promise.all(compared().map(model => asked("/v1/tokenize", {model, text})));
  if (turn !== counting) return;
  const [{ids, tokens, unseen}] = found;
  find("count").textContent = counted(ids.length);
  find("beyond").textContent = found.filter(each => each.unseen).map(({model, ids, unseen}) =>
    `The prompt exceeds the context length: ${model} sees only the last ${ids.length - unseen} `
    + `of ${counted(ids.length)}.`).join(" ");
  find("tokens").replaceChildren(...ids.slice(0, 2000).map((id, place) =>
    make("span", place < unseen ? "unseen" : "", seen(tokens[place]), make("small", "", id))));
});

on("ask", "submit", event => {
  event.preventDefault();
  start();
});
on("stop", "click", () => controller?.abort());
on("prompt", "input", later(150, refresh));
on("rival", "change", refresh);
document.addEventListener("keydown", event => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !find("writing").hidden) start();
  if (event.key !== "Escape" || find("code").open) return;
  if (!others.box.hidden) {
    others.from?.focus();
    others.close();
  } else controller?.abort();
});
