"use strict";
// What the scripts of all pages need to draw the data embedded in them. Nothing is fetched.

const find = id => document.getElementById(id);
const range = length => [...Array(length).keys()];
const all = selector => [...document.querySelectorAll(selector)];
const [ink, against] = ["ink", "against"].map(id => {  // the colors of a style sheet
  const probe = document.body.appendChild(Object.assign(document.createElement("span"), {id}));
  return getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number);
});

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

