"use strict";
// The playground. It calls only the API of the server that it was loaded from. This file has what the
// views share; writing.js is the view of language models, reading.js those of the other models.

const find = id => document.getElementById(id);
const on = (id, event, call) => find(id).addEventListener(event, call);
const make = (kind, classes = "", ...children) => {
  const element = document.createElement(kind);
  element.className = classes;
  element.append(...children);
  return element;
};
const button = (label, call) => {
  const element = make("button", "", label);
  element.type = "button";
  element.addEventListener("click", () => call(element));
  return element;
};
// A part of a text that reacts to the mouse and the focus; the arrow keys lead to its neighbors.
const part = (classes, label, show, hide) => {
  const span = make("span", classes, label);
  span.setAttribute("role", "button");
  for (const event of ["mouseenter", "focus", "click"])
    span.addEventListener(event, () => show(span, event !== "mouseenter"));
  for (const event of ["mouseleave", "blur"]) span.addEventListener(event, hide);
  span.addEventListener("keydown", event => {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!step) return;
    const all = [...span.parentNode.querySelectorAll("[role=button]")];
    all[all.indexOf(span) + step]?.focus();
    event.preventDefault();
  });
  return span;
};
const later = (wait, call) => {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(call, wait);
  };
};

// ---- The URL: inputs that differ from their defaults, as #prompt=…&temperature=…
// Browsers never send what follows the #. An API key there moves to the session at once.

const fields = {};  // inputs by name
const fill = (input, value) => {
  input.value = value;
  input.dispatchEvent(new Event("input"));
};
const showAddress = values => {
  const hash = String(new URLSearchParams(values));
  history.replaceState(null, "", location.pathname + (hash && `#${hash}`));
};
const opened = new URLSearchParams(location.hash.slice(1));
if (opened.has("key")) {
  sessionStorage.setItem("key", opened.get("key"));
  opened.delete("key");
  showAddress(opened);
}
const remember = later(300, () => showAddress(Object.entries(fields).flatMap(([name, {value, defaultValue}]) =>
  value === defaultValue ? [] : [[name, value]])));
for (const event of ["input", "change"]) document.addEventListener(event, remember, true);
addEventListener("hashchange", () => location.reload());

// ---- The server

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

// ---- Copying, and a request as code

const copy = (text, clicked) => {
  const area = make("textarea", "", text);
  clicked.after(area);
  area.select();
  document.execCommand("copy");  // navigator.clipboard would need HTTPS or localhost
  area.remove();
  clicked.focus();
  clicked.textContent = "Copied";
};
// `result` is the Python expression for the part of the response that the page shows.
const showCode = (path, body, result) => {
  const url = location.origin + path, secret = "NANOLM_SERVE_KEY";
  const json = JSON.stringify(body, null, 1).replaceAll(/\n */g, " ");
  find("curl").textContent = `curl ${url} -H 'Content-Type: application/json' \\\n`
    + (key ? `  -H "Authorization: Bearer $${secret}" \\\n` : "")
    + `  -d '${json.replaceAll("'", "'\\''")}'`;
  find("python").textContent = `${key ? "import os\n" : ""}import requests\n\nresponse = requests.post(\n    "${url}",\n`
    + (key ? `    headers={"Authorization": "Bearer " + os.environ["${secret}"]},\n` : "")
    + `    json=${json},\n)\nprint(response.json()${result})`;
  find("code").showModal();
};
for (const name of ["curl", "python"])
  on(`copy-${name}`, "click", event => copy(find(name).textContent, event.target));
on("code-close", "click", () => find("code").close());

// ---- Parameters

const params = {}, search = {};  // the values of the sliders, for completions and translations

// A slider for a field of the OpenAPI document.
const addSlider = (name, field, group) => {
  const {min, max, step, off} = field["x-slider"], first = field.default ?? off;
  const label = name.replaceAll("_", " "), most = Math.min(max, field.anyOf[0].maximum ?? max);
  const about = field.description + (field.default === null ? ` ${off} turns it off.` : "");
  const slider = make("input"), box = make("input");
  const row = make("label", "param", make("span", "", label), box, slider, make("small", "", about));
  row.dataset.name = name;
  Object.assign(slider, {type: "range", min, max: most, step, value: first, ariaLabel: label});
  Object.assign(box, {type: "number", min, step, defaultValue: first});
  slider.tabIndex = -1;  // in the box, the arrow keys do the same
  slider.addEventListener("input", () => { box.value = slider.value; });
  box.addEventListener("input", () => { slider.value = box.value; });
  const value = () => box.value === "" ? first : Number(box.value);
  group[name] = () => value() === first && field.default === null ? undefined : value();
  fields[group === search ? `translation_${name}` : name] = box;
  (group === search ? find("search") : find(`place-${name}`) || find("advanced")).append(row);
};
const sent = group => Object.fromEntries(Object.entries(group).map(([name, value]) => [name, value()]));

// ---- Inside the model: a drawer that follows the chosen text

let inspected = {}, view = "attention";  // the request, and how it is shown: as attention or as a walk
let opener = null;  // the button that opened the drawer; gets the focus back
const inspect = safely(async (given, wanted = view) => {
  problem(null);
  const {kind, attention} = models.find(each => each.id === given.model);
  const writes = kind === "language model", shown = writes && !attention ? "walk" : writes ? wanted : "attention";
  [inspected, view] = [given, wanted];
  const found = await asked(shown === "walk" ? "/v1/walk" : "/v1/inspect", given);
  if (inspected !== given || view !== wanted) return;
  find("look").src = found.page;
  find("views").hidden = !writes || !attention;
  for (const name of ["attention", "walk"]) find(name).setAttribute("aria-pressed", name === shown);
  if (!find("inside").hidden) return;
  opener = document.activeElement;
  find("inside").hidden = false;
  find("inside").scrollIntoView();  // on a phone, it is below the text
});
const follow = given => {
  if (!find("inside").hidden && JSON.stringify(given) !== JSON.stringify(inspected)) inspect(given);
};
for (const name of ["attention", "walk"]) on(name, "click", () => inspect(inspected, name));
on("close", "click", () => {
  find("inside").hidden = true;
  opener?.focus();
});

// ---- Models

let models = [], model = null;
const refresh = () => ({"language model": countTokens, classifier: classify, translator: translate})[model.kind]();

const choose = name => {
  model = models.find(each => each.id === name) || models[0];
  problem(model.id === name ? null : new Error(`no model ${name} is served here; using ${model.id}`));
  find("model").value = model.id;
  const {kind, ...counts} = model;
  find("facts").textContent = [kind, ...["parameters", "context", "vocabulary"].map(name =>
    `${name} ${counts[name].toLocaleString("en")}`)].join(" · ");
  for (const main of document.querySelectorAll("main")) main.hidden = main.dataset.kind !== model.kind;
  find("inside").hidden = true;
  inspected = {};
  for (const request of [classifying, translation]) request?.abort();
  for (const id of ["labels", "pairs"]) find(id).replaceChildren();
  others.close();
  offer();
  refresh();
};
on("model", "change", () => choose(find("model").value));

addEventListener("DOMContentLoaded", safely(async () => {
  const {CompletionRequest, TranslateRequest} = (await asked("/openapi.json")).components.schemas;
  for (const [{properties}, group] of [[CompletionRequest, params], [TranslateRequest, search]])
    for (const [name, field] of Object.entries(properties)) if (field["x-slider"]) addSlider(name, field, group);
  models = (await asked("/v1/models")).data;
  for (const name of ["model", "rival", "prompt", "input", "source", "seed", "stop", "ban"])
    fields[name] = find(`param-${name}`) || find(name);
  find("model").append(...models.map(each => new Option(each.id)));
  find("rival").append(new Option("none", ""), ...writers().map(each => new Option(each.id)));
  [fields.model.defaultValue, fields.rival.defaultValue] = [models[0].id, ""];
  if (innerWidth < 832) find("options").open = false;
  for (const [name, value] of opened) if (fields[name]) fill(fields[name], value);
  choose(opened.get("model") ?? models[0].id);
  visits.push(...JSON.parse(sessionStorage.getItem("visits") || "[]").filter(texts =>
    texts.length && texts.every(text => models.some(each => each.id === text.model))));
  if (visits.length) show(visits.at(-1));
  document.body.dataset.ready = "yes";
}));
