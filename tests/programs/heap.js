// Builds arrays, maps, typed arrays and buffers of about argv[2] MiB, walks and changes them.
"use strict";
const megabytes = Number(process.argv[2]);
const count = megabytes * 1600;
let seed = 12345;
const random = () => (seed = (seed * 1103515245 + 12345) % 2147483648);

const map = new Map();
const objects = [];
for (let i = 0; i < count; i++) {
  const key = "key" + random() + ":" + i;
  objects.push({ key, index: i, list: [i, i + 1, i + 2], text: "text " + i });
  map.set(key, i);
}
console.log("built", map.size, objects.length);

const buffers = [];
for (let i = 0; i < megabytes / 4; i++) {
  const buffer = Buffer.alloc(1 << 20);
  for (let j = 0; j < buffer.length; j += 64) buffer.writeUInt32LE((i * 65599 + j) >>> 0, j);
  buffers.push(buffer);
}
const doubles = new Float64Array(megabytes * 16384);
for (let i = 0; i < doubles.length; i++) doubles[i] = i * 0.5;

for (let turn = 0; turn < 2; turn++) {
  let sum = 0;
  for (const object of objects) {
    sum = (sum * 31 + map.get(object.key) + object.list[2] + object.text.length) % 1000000007;
  }
  for (const buffer of buffers) {
    for (let j = 0; j < buffer.length; j += 4096) sum = (sum * 33 + buffer.readUInt32LE(j)) % 1000000007;
  }
  for (let i = 0; i < doubles.length; i += 500) sum = (sum + doubles[i]) % 1000000007;
  console.log("walk", turn, sum);
}

// Garbage in the middle of what lives: the collector moves objects and gives chunks back.
for (let i = 0; i < objects.length; i += 2) { map.delete(objects[i].key); objects[i] = null; }
const again = objects.filter((object) => object !== null).map((object) => object.key + "!");
console.log("left", map.size, again.length, again[again.length >> 1]);
