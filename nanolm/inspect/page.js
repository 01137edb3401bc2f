"use strict";
// Draws the data embedded in the page and responds to the pointer. Nothing is fetched.

const find = id => document.getElementById(id);
const all = selector => [...document.querySelectorAll(selector)];
const color = id => getComputedStyle(find(id)).color.match(/[\d.]+/g).slice(0, 3).map(Number);
const ink = color("ink"), against = color("against");

const unpack = async text => {
  const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
};

// One pixel for each number from -1 to 1.
const draw = (canvas, width, height, numberAt) => {
  Object.assign(canvas, {width, height});
  const context = canvas.getContext("2d"), image = context.createImageData(width, height);
  for (let y = 0; y < height; y++) for (let x = 0; x < width; x++) {
    const number = numberAt(y, x);
    image.data.set([...(number < 0 ? against : ink), 255 * Math.abs(number)], 4 * (y * width + x));
  }
  context.putImageData(image, 0, 0);
};

// Attention is stored as the lower triangle of each head's map, row by row, as square roots.
const attention = async ({time, heads, levels, packed, first}) => {
  const half = time * (time + 1) / 2, packedLevels = new Uint8Array(await unpack(packed));
  const row = (shares, y) => shares.subarray(y * (y + 1) / 2, (y + 1) * (y + 2) / 2);
  const rootAt = shares => (y, x) => x > y ? 0 : Math.sqrt(row(shares, y)[x]);

  const tokens = all("#tokens button"), names = tokens.map(token => token.textContent);
  const numbers = [...Array(packedLevels.length / half).keys()];
  const maps = all(".grid button").map(button => {
    const {layer, head} = button.dataset;  // -1: the average of all
    const chosen = numbers.filter(number => (+layer < 0 || Math.floor(number / heads) === +layer)
      && (+head < 0 || number % heads === +head));
    const shares = new Float32Array(half);
    for (const number of chosen) for (let i = 0; i < half; i++)
      shares[i] += (packedLevels[number * half + i] / levels) ** 2 / chosen.length;
    draw(button.querySelector("canvas"), time, time, rootAt(shares));
    return {button, shares};
  });
  let here = time - 1, chosen = maps[first];

  const show = () => {
    const shares = row(chosen.shares, here);
    tokens.forEach((token, place) => {
      token.classList.toggle("on", place === here);
      token.style.setProperty("--w", Math.round(100 * Math.sqrt(shares[place] || 0)));
    });
    for (const {button, shares} of maps) {
      const from = row(shares, here), most = from.indexOf(Math.max(...from));
      button.classList.toggle("on", button === chosen.button);
      button.querySelector(".looks").textContent = `${names[most]} ${Math.round(100 * from[most])}%`;
    }
    find("about").textContent = `${chosen.button.title}. Selected token: ${names[here]} (${here + 1})`;
  };
  const choose = map => {
    chosen = map;
    draw(find("large"), time, time, rootAt(map.shares));
    show();
  };
  for (const map of maps) map.button.onclick = () => choose(map);
  tokens.forEach((token, place) => {
    token.onmouseenter = token.onfocus = token.onclick = () => { here = place; show(); };
  });
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
