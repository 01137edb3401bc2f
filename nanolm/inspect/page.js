// Attention is stored as square roots, row by row: the lower triangle of each head's map, or all of it
// if there is a source to which the tokens attend.
const attention = async ({time, source, heads, levels, packed, first}) => {
  const start = y => source ? y * source : y * (y + 1) / 2;
  const size = start(time), packedLevels = new Uint8Array(await unpack(packed));
  const row = (shares, y) => shares.subarray(start(y), start(y + 1));
  const drawMap = (canvas, shares) => {
    draw(canvas, source || time, time, (y, x) => Math.sqrt(row(shares, y)[x] || 0));
    if (source) canvas.style.aspectRatio = `${source} / ${time}`;
  };

  const tokens = all("#tokens button"), attended = source ? all("#source span") : tokens;
  const names = attended.map(token => token.textContent);
  const numbers = [...Array(packedLevels.length / size).keys()];
  const maps = all(".grid button").map(button => {
    const {layer, head} = button.dataset;  // -1: the average of all
    const chosen = numbers.filter(number => (+layer < 0 || Math.floor(number / heads) === +layer)
      && (+head < 0 || number % heads === +head));
    const shares = new Float32Array(size);
    for (const number of chosen) for (let i = 0; i < size; i++)
      shares[i] += (packedLevels[number * size + i] / levels) ** 2 / chosen.length;
    drawMap(button.querySelector("canvas"), shares);
    return {button, shares};
  });
  let here = source ? 0 : time - 1, chosen = maps[first];

  const show = (column = null) => {
    const shares = row(chosen.shares, here);
    tokens.forEach((token, place) => token.classList.toggle("on", place === here));
    attended.forEach((token, place) =>
      token.style.setProperty("--w", Math.round(100 * Math.sqrt(shares[place] || 0))));
    for (const {button, shares} of maps) {
      const from = row(shares, here), most = from.indexOf(Math.max(...from));
      button.classList.toggle("on", button === chosen.button);
      button.querySelector(".looks").textContent = `${names[most]} ${Math.round(100 * from[most])}%`;
    }
    const name = tokens[here].textContent;
    find("about").textContent = `${chosen.button.title}. Selected token: ${name} (${here + 1})`
      + (column === null ? "" : `, ${Math.round(100 * shares[column])}% to ${names[column]}`);
    all(".rows span").forEach((label, place) => label.classList.toggle("on", place === here));
    all(".columns span").forEach((label, place) => label.classList.toggle("on", place === column));
  };
  const choose = map => {
    chosen = map;
    drawMap(find("large"), map.shares);
    show();
  };
  for (const map of maps) map.button.onclick = () => choose(map);
  tokens.forEach((token, place) => {
    token.onmouseenter = token.onfocus = token.onclick = () => { here = place; show(); };
  });
  if (source) {
    const {style} = document.querySelector(".matrix");
    style.setProperty("--columns", source);
    find("large").onmousemove = find("large").onclick = ({offsetX, offsetY, target}) => {
      here = Math.min(time - 1, Math.floor(time * offsetY / target.clientHeight));
      show(Math.min(source - 1, Math.floor(source * offsetX / target.clientWidth)));
    };
  }
  choose(chosen);
};

(async () => {
  for (const canvas of all("canvas.heat")) {
    const {width, height, packed} = canvas.dataset, numbers = new Int8Array(await unpack(packed));
    draw(canvas, +width, +height, (y, x) => numbers[y * width + x] / 127);
  }
  if (find("data")) await attention(JSON.parse(find("data").textContent));
  document.body.dataset.ready = "yes";
})();
