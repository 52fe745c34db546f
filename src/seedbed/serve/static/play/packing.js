// The memory in the browser: the same bytes, rounding and scales as in training. The self-test compares it with golden arrays.

const LEVELS = 127.5; // a byte b stands for b / 127.5 - 1

// Rounds half to even, as in training.
export function roundEven(value) {
  const down = Math.floor(value);
  const rest = value - down;
  if (rest !== 0.5) return rest < 0.5 ? down : down + 1;
  return down % 2 ? down + 1 : down;
}

export function toFloat(byte) {
  return Math.fround(Math.fround(byte / LEVELS) - 1);
}

export const FLOATS = Float32Array.from({ length: 256 }, (_, byte) => toFloat(byte));

export function toByte(value) {
  const inside = Math.min(1, Math.max(-1, value));
  return roundEven(Math.fround(Math.fround(inside + 1) * LEVELS));
}

// Network inputs from raw controls; zero means that nothing moves.
export function scaleActions(raw, axes) {
  return Float32Array.from(raw, (value, n) => {
    const scaled = value / axes[n].scale - (axes[n].is_time ? 1 : 0);
    return Math.min(4, Math.max(-4, scaled));
  });
}

// Frames at every scale as bytes [N, 3, h, w], newest last, and as the floats that enter the network; and the pose of the newest
// frame, where poses are tracked.
export class Memory {
  constructor(scales, height, width) {
    this.pose = undefined;
    this.height = height;
    this.width = width;
    this.scales = scales.map(([reduction, num]) => {
      const [h, w] = [height / reduction, width / reduction];
      return { name: `m${reduction}`, reduction, num, h, w, bytes: new Uint8Array(num * 3 * h * w), floats: null };
    });
    for (const scale of this.scales) scale.floats = new Float32Array(scale.bytes.length);
  }

  // From images [N, h, w, 3] of every scale, oldest first.
  start(images) {
    this.scales.forEach((scale, s) => {
      const [from, size] = [images[s], scale.h * scale.w];
      for (let n = 0; n < scale.num; n++) {
        for (let p = 0; p < size; p++) {
          for (let c = 0; c < 3; c++) scale.bytes[(n * 3 + c) * size + p] = from[(n * size + p) * 3 + c];
        }
      }
      fill(scale);
    });
  }

  // One more frame [3, H, W] of bytes, without the oldest; coarse scales take the mean over squares, rounded.
  push(frame, pose) {
    this.pose = pose;
    for (const scale of this.scales) {
      const size = 3 * scale.h * scale.w;
      scale.bytes.copyWithin(0, size);
      const last = scale.bytes.subarray((scale.num - 1) * size);
      if (scale.reduction === 1) last.set(frame);
      else reduce(frame, last, this.height, this.width, scale.reduction);
      fill(scale);
    }
  }

  newest() {
    const scale = this.scales[0];
    return scale.bytes.subarray((scale.num - 1) * 3 * scale.h * scale.w);
  }
}

function fill(scale) {
  for (let i = 0; i < scale.bytes.length; i++) scale.floats[i] = FLOATS[scale.bytes[i]];
}

function reduce(frame, out, height, width, by) {
  const [h, w] = [height / by, width / by];
  for (let c = 0; c < 3; c++) {
    for (let y = 0; y < h; y++) {
      for (let x = 0; x < w; x++) {
        let sum = 0;
        for (let dy = 0; dy < by; dy++) {
          const row = (c * height + y * by + dy) * width + x * by;
          for (let dx = 0; dx < by; dx++) sum += frame[row + dx];
        }
        out[(c * h + y) * w + x] = roundEven(sum / (by * by));
      }
    }
  }
}

// [3, H, W] bytes to what a canvas takes.
export function toImage(frame, height, width) {
  const image = new ImageData(width, height);
  const size = height * width;
  for (let p = 0; p < size; p++) {
    for (let c = 0; c < 3; c++) image.data[4 * p + c] = frame[c * size + p];
    image.data[4 * p + 3] = 255;
  }
  return image;
}

// Normal numbers from a seed, so that repeated controls give the same rollout.
export function normals(seed, num) {
  let state = seed >>> 0;
  const uniform = () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };
  const drawn = new Float32Array(num);
  for (let i = 0; i < num; i += 2) {
    const [size, angle] = [Math.sqrt(-2 * Math.log(1 - uniform())), 2 * Math.PI * uniform()];
    drawn[i] = size * Math.cos(angle);
    if (i + 1 < num) drawn[i + 1] = size * Math.sin(angle);
  }
  return drawn;
}
