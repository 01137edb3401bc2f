// One forward pass, computed from the model's weights; for a larger model, a summary of one.
const data = JSON.parse(find("data").textContent);
const {roles, names, exact} = data, ids = [...data.ids], stages = data.stages;
stages.push({role: "next", side: stages.at(-1).side, layer: 0, op: "next", inputs: [stages.length - 1]});
roles.next = {name: "The next token", about: "The softmax of the logits of the selected token, after temperature and "
  + "filters. A random number selects one.", idea: "a language model predicts the probability of every next token"};
const values = [], weights = {};

const tensor = (heads, rows, cols, numberAt) => {
  const numbers = new Float64Array(heads * rows * cols);
  for (let h = 0, i = 0; h < heads; h++) for (let r = 0; r < rows; r++) for (let c = 0; c < cols; c++)
    numbers[i++] = numberAt(r, c, h);
  return {heads, rows, cols, numbers};
};
const at = (x, row, col, head = 0) => x.numbers[(head * x.rows + row) * x.cols + col];
const sum = numbers => numbers.reduce((total, number) => total + number, 0);
const dot = (x, row, first, y, other, second, width) => {
  let total = 0;
  for (let i = 0; i < width; i++) total += at(x, row, first + i) * at(y, other, second + i);
  return total;
};
const sigmoid = x => 1 / (1 + Math.exp(-x));
const erf = x => {  // its series, exact enough up to 6
  let term = x, total = x;
  for (let n = 1; n < 200 && Math.abs(x) < 6; n++) total += (term *= -x * x / n) / (2 * n + 1);
  return Math.abs(x) < 6 ? 2 / Math.sqrt(Math.PI) * total : Math.sign(x);
};
const NONLINEAR = {
  relu: x => Math.max(0, x),
  relu2: x => Math.max(0, x) ** 2,
  silu: x => x * sigmoid(x),
  swiglu: x => x * sigmoid(x),
  gelu: x => x / 2 * (1 + erf(x / Math.SQRT2)),
  gelu_tanh: x => x / 2 * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))),
};

// What a norm does to a number: its group's mean and size.
const spread = (x, row, col, {centered, epsilon, groups}) => {
  const width = x.cols / groups, first = Math.floor(col / width) * width;
  const group = range(width).map(i => at(x, row, first + i));
  const mean = centered ? sum(group) / width : 0;
  return {mean, size: Math.sqrt(sum(group.map(number => (number - mean) ** 2)) / width + epsilon), width};
};
// The other number of a rotated pair, with its sign; none for numbers that are not rotated.
const pair = (col, heads, cols, turned) => {
  const width = cols / heads, place = col % width, half = turned / 2;
  if (place >= turned) return null;
  return place < half ? [col + half, -1, place] : [col - half, 1, place];
};
const keyHead = (head, {heads, kv_heads}) => Math.floor(head * kv_heads / heads);
const masked = (row, col, {causal, window}) => causal && (col > row || row - col >= (window ?? Infinity));

const OPS = {
  lookup: (_, {table}, {by}, side) => {
    const chosen = by === "ids" ? ids : by === "source" ? data.source
      : range((side === "encoder" ? data.source : ids).length);
    return tensor(1, chosen.length, table.cols, (r, c) => at(table, chosen[r], c));
  },
  add: inputs => tensor(1, inputs[0].rows, inputs[0].cols, (r, c) => sum(inputs.map(x => at(x, r, c)))),
  scale: ([x], _, {by}) => tensor(1, x.rows, x.cols, (r, c) => by * at(x, r, c)),
  linear: ([x], {weight, bias}) => tensor(1, x.rows, weight.rows, (r, c) =>
    dot(x, r, 0, weight, c, 0, x.cols) + (bias ? at(bias, c, 0) : 0)),
  norm: ([x], {weight, bias}, options) => {
    let now = {};
    return tensor(1, x.rows, x.cols, (r, c) => {
      const width = x.cols / options.groups, place = c % width;
      if (place === 0) now = spread(x, r, c, options);
      return (at(x, r, c) - now.mean) / now.size * at(weight, place, 0) + (bias ? at(bias, place, 0) : 0);
    });
  },
  rope: ([x], {cosines, sines}, {heads}) => tensor(1, x.rows, x.cols, (r, c) => {
    const other = pair(c, heads, x.cols, cosines.cols);
    if (!other) return at(x, r, c);
    const place = c % (x.cols / heads);
    return at(x, r, c) * at(cosines, r, place) + other[1] * at(x, r, other[0]) * at(sines, r, place);
  }),
  scores: ([q, k], _, options) => {
    const {heads, slopes} = options, width = q.cols / heads;
    return tensor(heads, q.rows, k.rows, (r, c, h) => masked(r, c, options) ? -Infinity
      : dot(q, r, h * width, k, c, keyHead(h, options) * width, width) / Math.sqrt(width)
        - (slopes ? slopes[h] * (r - c) : 0));
  },
  softmax: ([x]) => {
    const top = tensor(x.heads, x.rows, 1, (r, _, h) => Math.max(...range(x.cols).map(c => at(x, r, c, h))));
    const power = (r, c, h) => Math.exp(at(x, r, c, h) - at(top, r, 0, h));  // does not overflow
    const totals = tensor(x.heads, x.rows, 1, (r, _, h) => sum(range(x.cols).map(c => power(r, c, h))));
    return tensor(x.heads, x.rows, x.cols, (r, c, h) => power(r, c, h) / at(totals, r, 0, h));
  },
  mix: ([shares, v], _, options) => {
    const width = v.cols / options.kv_heads;
    return tensor(1, shares.rows, options.heads * width, (r, c) => {
      const head = Math.floor(c / width), from = keyHead(head, options) * width + c % width;
      return sum(range(v.rows).map(key => at(shares, r, key, head) * at(v, key, from)));
    });
  },
  activation: ([x, up], _, {kind}) => tensor(1, x.rows, x.cols, (r, c) =>
    NONLINEAR[kind](at(x, r, c)) * (up ? at(up, r, c) : 1)),
  part: ([x], _, {first, last}) => tensor(1, x.rows, last - first, (r, c) => at(x, r, first + c)),
  rnn: ([x], {weight}) => {
    const h = tensor(1, x.rows, weight.cols, () => 0);
    for (let r = 0; r < x.rows; r++) for (let c = 0; c < h.cols; c++)
      h.numbers[r * h.cols + c] = Math.tanh(at(x, r, c) + (r ? dot(h, r - 1, 0, weight, c, 0, h.cols) : 0));
    return h;
  },
  lstm: ([x], {weight}) => {  // take, keep, new, show, c and h, side by side
    const dim = weight.cols, all = tensor(1, x.rows, 6 * dim, () => 0);
    for (let r = 0; r < x.rows; r++) for (let part = 0; part < 6; part++) for (let c = 0; c < dim; c++) {
      const [take, keep, fresh, show, cell] = range(5).map(other => at(all, r, other * dim + c));
      const before = r ? at(all, r - 1, 4 * dim + c) : 0, gate = part * dim + c;
      const product = part < 4 && at(x, r, gate) + (r ? dot(all, r - 1, 5 * dim, weight, gate, 0, dim) : 0);
      all.numbers[r * all.cols + gate] = part === 4 ? keep * before + take * fresh
        : part === 5 ? show * Math.tanh(cell) : part === 2 ? Math.tanh(product) : sigmoid(product);
    }
    return all;
  },
};
const weightsOf = stage => Object.fromEntries(Object.entries(stage.weights).map(([key, name]) => [key, weights[name]]));
const inputsOf = stage => stage.inputs.map(number => values[number]);
const compute = () => stages.slice(0, -1).forEach((stage, number) => {
  values[number] = OPS[stage.op](inputsOf(stage), weightsOf(stage), stage.options, stage.side);
});

// How a number came about: a sum of terms [label, factor, factor], and sentences with the rest.
const show = number => Number.isFinite(number) ? (Math.abs(number) >= 1e4 || (number && Math.abs(number) < 1e-4)
  ? number.toExponential(3) : number.toPrecision(4).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "")).replace("-", "−")
  : number < 0 ? "−∞" : String(number);
const label = id => names[id] ?? id;
const tokensOf = side => side === "encoder" ? data.source : ids;
const labelsOf = side => side === "encoder" ? data.source_names : ids.map(label);
const HOW = {
  lookup: (_, __, {by}, r, c, h, side) => ({say: [by === "positions" ? `Position ${r + 1} in the table of positions.`
    : `The token “${labelsOf(side)[r]}” has the id ${tokensOf(side)[r]}: its row of the table, number ${c + 1}.`]}),
  add: (inputs, _, __, r, c, h, side, stage) => ({terms: inputs.map((x, n) =>
    [title(stages[stage.inputs[n]]), at(x, r, c)])}),
  scale: ([x], _, {by}, r, c) => ({terms: [["", at(x, r, c), by]]}),
  linear: ([x], {weight, bias}, _, r, c) => ({
    terms: range(x.cols).map(i => [`input ${i + 1}`, at(x, r, i), at(weight, c, i)]),
    more: bias ? [["bias", at(bias, c, 0)]] : []}),
  norm: ([x], {weight, bias}, options, r, c) => {
    const {mean, size, width} = spread(x, r, c, options), place = c % width;
    return {say: [
      `Input: ${show(at(x, r, c))}. ${options.centered ? `Mean of all ${width}: ${show(mean)}. Standard deviation`
        : `Root mean square of all ${width}`}: ${show(size)}.`,
      `(${show(at(x, r, c))}${options.centered ? ` − ${show(mean)}` : ""}) ÷ ${show(size)} × weight ${show(at(weight, place, 0))}`
        + (bias ? ` + bias ${show(at(bias, place, 0))}` : "")]};
  },
  rope: ([x], {cosines, sines}, {heads}, r, c) => {
    const other = pair(c, heads, x.cols, cosines.cols), place = c % (x.cols / heads);
    if (!other) return {say: ["This number is not rotated."]};
    return {say: [`Rotated with number ${other[0] + 1} by an angle for position ${r + 1}.`],
      terms: [["× cosine", at(x, r, c), at(cosines, r, place)],
        ["× sine", other[1] * at(x, r, other[0]), at(sines, r, place)]]};
  },
  scores: ([q, k], _, options, r, c, h) => {
    if (masked(r, c, options)) return {say: ["Masked: a token cannot attend to this one, so its score is −∞."]};
    const width = q.cols / options.heads, key = keyHead(h, options) * width;
    return {terms: range(width).map(i => [`query × key ${i + 1}`, at(q, r, h * width + i), at(k, c, key + i)]),
      say: [`The sum, divided by √${width}` + (options.slopes
        ? `, minus ${show(options.slopes[h])} × distance ${r - c}.` : ".")]};
  },
  softmax: ([x], _, __, r, c, h, side, stage) => ({
    say: [`exp(${show(at(x, r, c, h))}), divided by the sum of exp(score) over all tokens:`],
    terms: keysOf(stage).map((name, key) => [name, Math.exp(at(x, r, key, h))]).filter(term => term[1])}),
  mix: ([shares, v], _, options, r, c, h, side, stage) => {
    const width = v.cols / options.kv_heads, head = Math.floor(c / width);
    const from = keyHead(head, options) * width + c % width;
    return {terms: keysOf(stages[stage.inputs[0]]).map((name, key) =>
      [`weight × value of ${name}`, at(shares, r, key, head), at(v, key, from)]).filter(term => term[1])};
  },
  activation: ([x, up], _, {kind}, r, c) => ({say: [`${kind === "swiglu" ? "silu" : kind}(${show(at(x, r, c))}) = `
    + show(NONLINEAR[kind](at(x, r, c))) + (up ? `, times ${show(at(up, r, c))} of “up”` : "")]}),
  part: ([x], _, {first}, r, c, h, side, stage) => {
    const gates = stages[stage.inputs[0]];
    return HOW[gates.op](inputsOf(gates), weightsOf(gates), {}, r, first + c, h, side, gates);
  },
  rnn: ([x], {weight}, _, r, c, h, side, stage) => recurrent(values[stages.indexOf(stage)], 0, weight, x, r, c, "tanh"),
  lstm: ([x], {weight}, _, r, c, h, side, stage) => {
    const all = values[stages.indexOf(stage)], dim = weight.cols, part = Math.floor(c / dim), place = c % dim;
    const one = other => at(all, r, other * dim + place);
    if (part < 4) return recurrent(all, 5 * dim, weight, x, r, c, part === 2 ? "tanh" : "sigmoid");
    if (part === 5) return {say: ["Output gate × tanh(c)"], terms: [["", one(3), Math.tanh(one(4))]]};
    return {terms: [["forget gate × c of the token before", one(1), r ? at(all, r - 1, c) : 0],
      ["input gate × new value", one(0), one(2)]]};
  },
};
const recurrent = (states, first, weight, x, r, c, name) => ({
  terms: r ? range(weight.cols).map(i => [`state ${i + 1} of the token before`, at(states, r - 1, first + i), at(weight, c, i)]) : [],
  more: [["input product", at(x, r, c)]], say: [`${name} of the sum.`]});
const product = ([, left, right = 1]) => left * right;

// The page: the selected stage, token, head and number.
let stage = 0, row = ids.length - 1, head = 0, col = 0;
let drawn = "";  // how the last token was sampled
const where = ({layer, side}) => [side, layer && `layer ${layer}`].filter(Boolean).join(", ");
const title = one => (where(one) ? `${where(one)}: ` : "").replace(/^./, letter => letter.toUpperCase())
  + roles[one.role].name;
const attends = one => ["scores", "softmax"].includes(one.op);
const largest = numbers => numbers.reduce((most, number) =>
  Number.isFinite(number) ? Math.max(most, Math.abs(number)) : most, 0) || 1;
const keysOf = ({op, inputs}) => {  // the tokens that are attended to
  let key = stages[op === "softmax" ? stages[inputs[0]].inputs[1] : inputs[1]];
  while (!["key", "cross_key"].includes(key.role)) key = stages[key.inputs[0]];
  return labelsOf(key.role === "key" ? key.side : "encoder");
};
const element = (kind, text = "", name = "") => Object.assign(document.createElement(kind), {textContent: text, className: name});
const percent = (part, whole) => `${100 * part / whole}%`;
// The heads of a stage, and that of the selected number.
const headsOf = ({options, op}, number) => attends({op}) ? values[number].heads
  : options?.heads && op !== "scores" ? options.heads : options?.groups ?? 1;
const headNow = () => attends(stages[stage]) ? Math.min(head, values[stage].heads - 1)
  : Math.floor(col * headsOf(stages[stage], stage) / (values[stage]?.cols ?? 1));

// A picture of a stage: one row for each token, one column for each number.
const strip = (number, input) => {
  const x = values[number], square = attends(stages[number]), most = largest(x.numbers);
  const box = element("figure", "", "strip");
  const caption = element("figcaption");
  const name = title(stages[number]);
  if (input) {
    const button = element("button", name);
    button.onclick = () => go(number);
    caption.append("from ", button);
  } else caption.textContent = square ? "" : `${name}: ${x.rows} × ${stages[number].width ?? x.cols}, at most ${show(most)}`;
  box.append(caption);
  for (const h of input && square ? [Math.min(headNow(), x.heads - 1)] : range(x.heads)) {
    const frame = element("div", "", "frame"), canvas = element("canvas");
    if (square) frame.append(element("small", `head ${h + 1}`));
    const whole = element("div", "", input ? "whole small" : "whole");
    whole.append(canvas);
    if (!input && !square) {
      const labels = element("div", "", "names");
      labels.append(...labelsOf(stages[number].side).map(name => element("span", name)));
      whole.append(labels);
    }
    draw(canvas, x.cols, x.rows, (r, c) => {
      const value = at(x, r, c, h);
      return Number.isFinite(value) ? Math.sign(value) * Math.sqrt(Math.abs(value) / most) : 0;
    });
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${name}${square ? `, head ${h + 1}` : ""}`);
    whole.style.setProperty("--cols", x.cols);
    whole.style.setProperty("--rows", x.rows);
    whole.classList.toggle("square", square);
    const here = Math.min(row, x.rows - 1), line = element("i", "", "line");
    line.style.top = percent(here, x.rows);
    line.style.height = percent(1, x.rows);
    whole.append(line);
    if (!input && (!square || h === headNow())) {
      const cell = element("i", "", "cell");
      Object.assign(cell.style, {top: percent(here, x.rows), height: percent(1, x.rows),
        left: percent(Math.min(col, x.cols - 1), x.cols), width: percent(1, x.cols)});
      whole.append(cell);
    }
    if (!input) whole.onpointermove = whole.onclick = ({clientX, clientY, type, buttons}) => {
      if (type === "pointermove" && !buttons) return;
      const {left, top, width, height} = canvas.getBoundingClientRect();
      if (square) head = h;
      choose(Math.floor((clientY - top) / height * x.rows), Math.floor((clientX - left) / width * x.cols));
    };
    frame.append(whole);
    box.append(frame);
  }
  return box;
};

const choose = (y, x) => {
  row = Math.max(0, Math.min(y, (values[stage] ?? values[stage - 1]).rows - 1));
  col = Math.max(0, Math.min(x, (values[stage] ?? values[stage - 1]).cols - 1));
  render();
};
const go = number => {
  stage = Math.max(0, Math.min(number, stages.length - 1));
  const {rows, cols} = values[stage] ?? values[stage - 1];
  row = Math.min(row, rows - 1);
  col = Math.min(col, cols - 1);
  render();
};

const candidates = () => {  // [id, logit], the highest first
  if (!exact) return data.best[row].map((id, n) => [id, at(values[stages.length - 2], row, n)]);
  const logits = values.at(-1), known = Object.keys(names).length;  // some models pad their vocabulary
  return range(known).filter(id => !data.unseen.includes(id)).map(id => [id, at(logits, row, id)])
    .sort((a, b) => b[1] - a[1]);
};
// The probabilities before and after temperature and filters.
const distribution = () => {
  const all = candidates(), top = all[0][1], heat = +find("temperature").value;
  const rest = exact ? 0 : Math.exp(data.rest[row] - top);
  const total = sum(all.map(([, logit]) => Math.exp(logit - top))) + rest;
  const k = Math.max(0, +find("k").value) || all.length, p = +find("p").value || 1;
  const least = all[Math.min(k, all.length) - 1][1];  // ties are kept
  const warm = all.map(([, logit]) => logit >= least ? Math.exp((logit - top) / heat) : 0), sumWarm = sum(warm);
  let before = 0;
  const kept = warm.map((value, n) => {
    const keep = n === 0 || before < p;
    before += value / sumWarm;
    return keep ? value : 0;
  });
  const sumKept = sum(kept);
  return all.map(([id, logit], n) => ({id, logit, model: Math.exp(logit - top) / total, after: kept[n] / sumKept}));
};

const number = (value, most, name, place) => {
  const cell = element("span", show(value), "number");
  cell.style.setProperty("--tint", `${Math.round(50 * Math.sqrt(Math.min(1, Math.abs(value) / most || 0)))}%`);
  cell.classList.add(value < 0 ? "neg" : "pos");
  cell.classList.toggle("on", place === col);
  if (name !== undefined) cell.prepend(element("small", name));
  cell.onclick = () => choose(row, place);
  return cell;
};

const renderNumbers = () => {
  const box = find("numbers"), role = stages[stage].role, side = labelsOf(stages[stage].side);
  box.replaceChildren();
  if (role === "next" || (role === "logits" && !exact)) {
    find("heading").textContent = `After “${side[row]}”`;
    const table = element("table"), shown = distribution().slice(0, 20);
    const titles = element("tr");
    for (const name of ["token", "logit", "model", ...exact ? ["after filters"] : []]) titles.append(element("th", name));
    table.append(titles);
    for (const {id, logit, model, after} of shown) {
      const line = element("tr"), bar = element("td"), meter = element("i", "", "meter");
      meter.style.width = `${Math.round(160 * (exact ? after : model))}px`;
      bar.append(meter);
      for (const text of [label(id), show(logit), share(model), ...exact ? [share(after)] : []]) line.append(element("td", text));
      line.append(bar);
      table.append(line);
    }
    box.append(table);
    return;
  }
  const x = values[stage], numbers = range(x.cols).map(c => at(x, row, c, attends(stages[stage]) ? headNow() : 0));
  const most = largest(numbers);
  find("heading").textContent = `Numbers of “${side[row]}” (token ${row + 1})` + (attends(stages[stage]) ? `, head ${headNow() + 1}` : "");
  const order = role === "logits" ? range(x.cols).sort((a, b) => numbers[b] - numbers[a]).slice(0, 60) : range(x.cols);
  const named = role === "logits" ? label : attends(stages[stage]) ? key => keysOf(stages[stage])[key] : () => undefined;
  box.append(...order.map(place => number(numbers[place], most, named(place), place)));
};
const share = value => value === 0 ? "0" : value < 0.001 ? "<0.1%" : `${(100 * value).toFixed(1)}%`;

const renderHow = () => {
  const box = find("how"), one = stages[stage];
  box.replaceChildren();
  if (!exact || one.role === "next") return;
  const h = attends(one) ? headNow() : 0, value = at(values[stage], row, col, h);
  const how = HOW[one.op](inputsOf(one), weightsOf(one), one.options, row, col, h, one.side, one);
  const name = one.role === "logits" ? `the logit of “${label(col)}”`
    : attends(one) ? `the number for “${keysOf(one)[col]}”` : `number ${col + 1}`;
  box.append(element("h3", `How ${name} became ${show(value)}`), ...(how.say ?? []).map(text => element("p", text)));
  const terms = [...(how.terms ?? [])].sort((a, b) => Math.abs(product(b)) - Math.abs(product(a)));
  const shown = [...terms.slice(0, 12), ...(how.more ?? [])], rest = terms.slice(12);
  if (!shown.length) return;
  const table = element("table");
  const add = (name, left, right, result) => {
    const line = element("tr");
    line.append(...[name, left, right, result].map(text => element("td", text)));
    table.append(line);
  };
  for (const term of shown)
    add(term[0], term.length > 2 ? show(term[1]) : "", term.length > 2 ? `× ${show(term[2])}` : "", show(product(term)));
  if (rest.length) add(`${rest.length} smaller terms`, "", "", show(sum(rest.map(product))));
  add("sum", "", "", show(sum([...terms, ...(how.more ?? [])].map(product))));
  box.append(table);
};

const render = () => {
  const one = stages[stage], side = labelsOf(one.side);
  find("tokens").replaceChildren(...side.map((name, place) => {
    const button = element("button", name, place === row ? "on" : "");
    button.tabIndex = place === row ? 0 : -1;
    button.setAttribute("aria-pressed", place === row);
    button.onclick = () => choose(place, col);
    return button;
  }));
  all("#stages button").forEach((button, place) => {
    button.classList.toggle("on", place === stage);
    button.tabIndex = place === stage ? 0 : -1;
    if (place === stage) {
      button.setAttribute("aria-current", "step");
      const list = find("stages");
      list.scrollTo({top: button.offsetTop - list.clientHeight / 2, left: button.offsetLeft - list.clientWidth / 2});
    } else button.removeAttribute("aria-current");
  });
  const count = headsOf(one, stage);
  find("heads").hidden = count < 2;
  find("head").replaceChildren(...range(count).map(h => new Option(h + 1, h, false, h === headNow())));
  find("title").textContent = title(one);
  find("say").textContent = roles[one.role].about;
  const picture = one.role !== "next" && (exact || one.role !== "logits");
  find("pictures").replaceChildren(...one.role === "next" ? [] : one.inputs.map(number => strip(number, true)),
    ...picture ? [strip(stage, false)] : []);
  find("next").hidden = one.role !== "next";
  find("next").querySelector(".bar").hidden = !exact;
  find("draw").disabled = ids.length >= data.limit || row < ids.length - 1;
  find("drawn").textContent = row < ids.length - 1 ? "Select the last token to sample the next one." : drawn;
  find("heat").textContent = find("temperature").value;
  renderNumbers();
  renderHow();
  const {where: file, code, idea} = roles[one.role];
  find("idea").textContent = `In the course (docs/course.md): ${idea}.`;
  find("code").hidden = !code;
  find("code").querySelector("summary").textContent = `The code: ${file}`;
  find("code").querySelector("pre").textContent = code;
};

const append = () => {
  const likely = distribution().filter(({after}) => after > 0), u = Math.random();
  let end = 0;
  const chosen = likely.find(({after}) => u < (end += after)) ?? likely.at(-1);
  ids.push(chosen.id);
  row = ids.length - 1;
  compute();
  drawn = `The random number ${u.toFixed(3)} lies between ${(end - chosen.after).toFixed(3)} and `
    + `${end.toFixed(3)}: “${label(chosen.id)}”. It is now part of the text, and every stage was computed again.`;
  render();
};

const nearest = step => {  // the same stage of the next or previous layer
  const places = stages.map((one, number) => [where(one), one.layer, number]);
  const groups = [...new Set(places.map(([name]) => name))].map(name => places.filter(place => place[0] === name));
  const group = groups.findIndex(group => group.some(([, , number]) => number === stage));
  const offset = groups[group].findIndex(([, , number]) => number === stage);
  const other = groups[group + step]?.[0][1] ? groups[group + step] : null;
  if (other) go(other[Math.min(offset, other.length - 1)][2]);
};
const chooseHead = next => {
  const count = headsOf(stages[stage], stage), chosen = Math.max(0, Math.min(next, count - 1));
  if (attends(stages[stage])) head = chosen;
  else col = Math.floor(chosen * values[stage].cols / count);
  render();
};
const KEYS = {
  ArrowLeft: () => go(stage - 1),
  ArrowRight: () => go(stage + 1),
  ArrowUp: () => choose(row - 1, col),
  ArrowDown: () => choose(row + 1, col),
  PageUp: () => nearest(-1),
  PageDown: () => nearest(1),
  ",": () => choose(row, col - 1),
  ".": () => choose(row, col + 1),
  H: () => chooseHead(headNow() - 1),
  h: () => chooseHead(headNow() + 1),
};

(async () => {
  const floats = new Float32Array(await unpack(data.packed));
  let place = 0;
  const take = size => floats.subarray(place, place += size);
  if (exact) {
    for (const [name, rows, cols = 1] of data.weights) weights[name] = {heads: 1, rows, cols, numbers: take(rows * cols)};
    compute();
  } else {
    data.shapes.forEach((shape, number) => {
      const [heads, rows, cols] = [...Array(3 - shape.length).fill(1), ...shape];
      values[number] = {heads, rows, cols, numbers: take(heads * rows * cols)};
    });
    data.rest = values.pop().numbers;
    find("summary").hidden = false;
  }
  let group = 0;
  stages.forEach((one, number) => {
    const name = where(one) || (number && "output");
    if (name !== group && name) find("stages").append(element("p", (group = name)));
    group = name;
    const button = element("button", roles[one.role].name);
    button.onclick = () => go(number);
    find("stages").append(button);
  });
  find("back").onclick = KEYS.ArrowLeft;
  find("on").onclick = KEYS.ArrowRight;
  find("head").onchange = ({target}) => chooseHead(+target.value);
  for (const name of ["temperature", "k", "p"]) find(name).oninput = render;
  find("draw").onclick = append;
  document.onkeydown = event => {
    const busy = ["INPUT", "SELECT"].includes(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey;
    if (busy || !KEYS[event.key]) return;
    event.preventDefault();
    KEYS[event.key]();
  };
  render();
  document.body.dataset.ready = "yes";
})();
