const MOST_NAMES = 40, MOST_TICKS = 16;  // per axis; of more, only every second, third ... is shown
const STEPS = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]};
const percent = share => share > 0 && share < 0.005 ? "<1%" : `${Math.round(100 * share)}%`;
const make = (kind, className, ...inside) => {
  const element = Object.assign(document.createElement(kind), {className});
  element.append(...inside);
  return element;
};

// Names on both axes of a picture, and a cross-hair that follows the pointer, a finger or the arrow
// keys. `select` is called with the row and the column. Returns a function that marks a cell and shows
// a text beside it.
const axes = (canvas, rows, columns, corner, most, select) => {
  const box = make("div", `matrix ${canvas.className}`, make("small", "corner", corner)), badge = make("b", "badge");
  const set = (name, value) => box.style.setProperty(`--${name}`, value);
  const axis = (names, kind) => {
    const every = Math.ceil(names.length / most), spans = range(Math.ceil(names.length / every)).map(() => make("span", ""));
    box.append(make("div", kind, ...spans));
    set(kind, names.length);
    set(`${kind}-every`, every);
    return place => {
      set(`${kind}-at`, place);
      spans.forEach((span, n) => {
        const on = Math.floor(place / every) === n;
        span.textContent = names[on ? place : n * every];
        span.classList.toggle("on", on);
      });
    };
  };
  canvas.replaceWith(box);
  const markColumn = axis(columns, "columns"), markRow = axis(rows, "rows");
  const plane = box.appendChild(make("div", "plane", canvas, make("i", "row"), make("i", "column"), badge));
  Object.assign(box, {tabIndex: 0, role: "application", ariaLabel: `${corner}. Arrow keys select a cell.`});
  let here = [0, 0];
  const move = cell => select(...[rows, columns].map((names, n) => Math.max(0, Math.min(names.length - 1, cell[n]))));
  plane.onpointermove = plane.onpointerdown = ({clientX, clientY}) => {
    const {left, top, width, height} = canvas.getBoundingClientRect();
    move([rows.length * (clientY - top) / height, columns.length * (clientX - left) / width].map(Math.floor));
  };
  box.onkeydown = event => {
    if (!STEPS[event.key]) return;
    event.preventDefault();
    move(here.map((place, n) => place + STEPS[event.key][n]));
  };
  return (y, x, text) => {
    here = [y, x];
    markRow(y);
    markColumn(x);
    badge.textContent = text;
    badge.classList.toggle("left", x >= columns.length / 2);
  };
};

// Only one of several buttons is a tab stop; the arrow keys move to the others.
const roving = buttons => buttons.forEach((button, n) => button.onkeydown = ({key}) => {
  const next = buttons[n + (STEPS[key]?.[1] || NaN)];
  next?.focus();
  next?.click();
});

// Attention is stored as square roots, row by row: the lower triangle of each head's map, or all of it
// if there is a source to which the tokens attend.
const attention = async ({time, source, heads, levels, packed, shown}) => {
  const start = y => source ? y * source : y * (y + 1) / 2;
  const size = start(time), packedLevels = new Uint8Array(await unpack(packed));
  const row = (shares, y) => shares.subarray(start(y), start(y + 1));
  const drawMap = (canvas, shares) => draw(canvas, source || time, time, (y, x) => Math.sqrt(row(shares, y)[x] || 0));
  const about = share => (levels < 63 ? "≈" : "") + percent(share);

  const tokens = all("#tokens button"), attended = source ? all("#source span") : tokens;
  const [names, keys] = [tokens, attended].map(list => list.map(token => token.textContent));
  const maps = all(".grid button").map(button => {
    const {layer, head} = button.dataset;  // -1: the average of all
    const chosen = range(packedLevels.length / size).filter(number => (+layer < 0 || Math.floor(number / heads) === +layer)
      && (+head < 0 || number % heads === +head));
    const shares = new Float32Array(size);
    for (const number of chosen) for (let i = 0; i < size; i++)
      shares[i] += (packedLevels[number * size + i] / levels) ** 2 / chosen.length;
    drawMap(button.querySelector("canvas"), shares);
    return {button, shares};
  });
  const panels = ["large", "beside"].map((id, number) => {
    const canvas = find(id), panel = canvas.closest(".panel"), select = panel.querySelector("select");
    select.append(...maps.map(({button}, n) => new Option(button.title, n)));
    select.value = number && innerWidth < 800 ? "" : shown[number];
    select.onchange = () => show();
    const mark = axes(canvas, names, keys, source ? "translation ↓ source →" : "from ↓ to →", MOST_NAMES, show);
    return {canvas, panel, select, mark};
  });

  let here = source ? 0 : time - 1, there = null;  // null: where most of the attention goes
  function show(y = here, x = there) {
    [here, there] = [y, x];
    const first = +panels[0].select.value, shares = row(maps[first].shares, y);
    x ??= shares.indexOf(Math.max(...shares));
    tokens.forEach((token, place) => Object.assign(token, {tabIndex: place === y ? 0 : -1, ariaPressed: place === y}));
    attended.forEach((token, place) => token.style.setProperty("--w", Math.round(100 * Math.sqrt(shares[place] || 0))));
    maps.forEach(({button, shares}, n) => {
      const from = row(shares, y), most = from.indexOf(Math.max(...from));
      Object.assign(button, {tabIndex: n === first ? 0 : -1, ariaPressed: n === first});
      button.querySelector(".looks").textContent = `${keys[most]} ${about(from[most])}`;
    });
    for (const one of panels) {
      const map = maps[one.select.value], share = map && row(map.shares, y)[x], masked = share === undefined;
      one.panel.classList.toggle("empty", !map);
      if (map && map !== one.map) drawMap(one.canvas, (one.map = map).shares);
      one.mark(y, x, masked ? "masked" : about(share));
      one.panel.querySelector("p").textContent = `${names[y]} (${y + 1}) ` + (masked ? "cannot attend to later tokens"
        : `attends to ${keys[x]} (${x + 1}): ${about(share)}`);
    }
  }
  maps.forEach(({button}, n) => button.onclick = () => { panels[0].select.value = n; show(); });
  tokens.forEach((token, place) => token.onmouseenter = token.onfocus = token.onclick = () => show(place, null));
  roving(tokens);
  roving(maps.map(({button}) => button));
  show();
};

// Numbers from -1 to 1, times `most`.
const heat = async canvas => {
  const {width, height, packed, most, names} = canvas.dataset, numbers = new Int8Array(await unpack(packed));
  const [row, column] = names.split(","), ticks = [+height, +width].map(count => range(count).map(n => `${n + 1}`));
  const show = (y, x) => {
    const value = String(+(numbers[y * width + x] / 127 * most).toPrecision(2)).replace("-", "−");
    mark(y, x, value);
    canvas.closest(".panel").querySelector("p").textContent = `${row} ${y + 1}, ${column} ${x + 1}: ${value}`;
  };
  const mark = axes(canvas, ...ticks, `${row} ↓ ${column} →`, MOST_TICKS, show);
  draw(canvas, +width, +height, (y, x) => numbers[y * width + x] / 127);
  show(0, 0);
};

// The points of each layer on the first two principal components, with labels that do not overlap.
const scatter = ({points, shares, labels}) => {
  const map = find("map"), slider = find("layer"), tables = all("section.layer");
  const most = 1.2 * Math.max(...points.flat(2).map(Math.abs)) || 1;
  const add = (kind, attributes, text = "") => {
    const element = map.appendChild(document.createElementNS(map.namespaceURI, kind));
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.textContent = text;
  };
  const show = () => {
    const layer = +slider.value, width = map.clientWidth, height = map.clientHeight;
    const unit = Math.min(width, height) / 2 / most, at = ([x, y]) => [width / 2 + unit * x, height / 2 - unit * y];
    const [left, middle] = at([0, 0]);
    map.replaceChildren();
    add("line", {x1: 0, y1: middle, x2: width, y2: middle});
    add("line", {x1: left, y1: 0, x2: left, y2: height});
    const [across, upwards] = shares[layer].map((share, n) => `PC ${n + 1}, ${percent(share)} of the variance`);
    add("text", {x: width - 6, y: height - 6, class: "tick end"}, `${across} →`);
    add("text", {x: 6, y: 14, class: "tick"}, `↑ ${upwards}`);
    const placed = [];
    for (const [[x, y], label] of points[layer].map((point, n) => [at(point), labels[n]]).sort((a, b) => a[0][1] - b[0][1])) {
      const name = width < 600 ? label.split(" ")[0] : label, room = 15 + 7 * name.length;  // pixels, roughly
      const side = (x < left ? x > room : width - x < room) ? -1 : 1;
      const [start, end] = [x, x + side * room].sort((a, b) => a - b);
      let down = y + 4;
      while (placed.some(other => Math.abs(other.down - down) < 16 && other.start < end && start < other.end)) down += 2;
      placed.push({start, end, down});
      add("line", {x1: x, y1: y, x2: x + 12 * side, y2: down - 4});
      add("circle", {cx: x, cy: y, r: 5});
      add("text", {x: x + 15 * side, y: down, class: side < 0 ? "end" : ""}, name);
    }
    tables.forEach((table, n) => table.hidden = n !== layer);
    find("place").textContent = layer ? `after layer ${layer}` : "embedding";
  };
  slider.closest("p").hidden = slider.max === "0";
  slider.oninput = window.onresize = show;
  show();
};

(async () => {
  for (const canvas of all("canvas.swatch")) draw(canvas, 1, 1, () => canvas.dataset.value);
  await Promise.all(all("canvas.heat").map(heat));
  if (find("points")) scatter(JSON.parse(find("points").textContent));
  if (find("data")) await attention(JSON.parse(find("data").textContent));
  document.body.dataset.ready = "yes";
})();
