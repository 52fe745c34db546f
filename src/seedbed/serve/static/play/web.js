// Backend of the exported page: ONNX Runtime Web on WebGPU, else on WebAssembly. There is no server.

import { Memory, normals, scaleActions, toByte, toImage } from "./packing.js";

export class Web {
  constructor(handlers) {
    this.handlers = handlers;
    this.busy = Promise.resolve();
  }

  async open() {
    try {
      this.handlers.state("loading the network", true);
      const [manifest, data] = await Promise.all([fetched("manifest.json", "json"), fetched("arrays.bin", "arrayBuffer")]);
      this.facts = manifest;
      this.arrays = views(manifest.arrays, data);
      await this.load();
      this.handlers.state("testing itself", true);
      this.result = await this.selfTest();
      window.selfTest = this.result;
      if (!this.result.ok) throw new Error(`the self-test failed: ${this.result.text}`);
      const about = `${manifest.about}. Self-test: ${this.result.text}.`;
      const name = document.title.replace(/ · seedbed$/, "");
      this.handlers.hello({ ...manifest, hello: name, about, references: ["nothing"], runtime: this.runtime, fixed: true, noisy: true });
    } catch (error) {
      window.selfTest = window.selfTest || { ok: false, text: String(error) };
      this.handlers.error(error.message || String(error), true);
    }
  }

  async load() {
    const hasGpu = navigator.gpu && (await navigator.gpu.requestAdapter().catch(() => null));
    for (const kind of hasGpu ? ["webgpu", "wasm"] : ["wasm"]) {
      try {
        const ort = await import(`./ort/ort.${kind}.min.mjs`);
        ort.env.wasm.wasmPaths = new URL("./ort/", location.href).href;
        ort.env.wasm.numThreads = globalThis.crossOriginIsolated ? Math.min(4, navigator.hardwareConcurrency || 1) : 1;
        this.session = await ort.InferenceSession.create("./network.onnx", { executionProviders: [kind] });
        this.ort = ort;
        this.runtime = kind === "webgpu" ? "WebGPU" : "WebAssembly";
        return;
      } catch (error) {
        this.failed = error;
      }
    }
    throw new Error(`ONNX Runtime Web does not start (${this.failed.message}); is the folder ort/ beside this page?`);
  }

  // The next frame, and the next pose where the network tracks poses.
  async run(memory, scaled, noise) {
    const { height, width } = this.facts;
    const tensor = (data, shape) => new this.ort.Tensor("float32", data, shape);
    const feed = { action: tensor(scaled, [1, scaled.length]), level: tensor(new Float32Array(1), [1]) };
    feed.noise = tensor(noise, [1, 1, height, width]);
    for (const scale of memory.scales) feed[scale.name] = tensor(scale.floats, [1, 3 * scale.num, scale.h, scale.w]);
    if (memory.pose) feed.pose = tensor(memory.pose, [1, memory.pose.length]);
    const given = await this.session.run(feed);
    return [given.frame.data, given.pose_after && Float32Array.from(given.pose_after.data)];
  }

  // Golden inputs through our own packing, scaling and rounding, and through the network.
  async selfTest() {
    const { facts, arrays } = this;
    const memory = this.memoryOf(0);
    const worst = { packing: 0, scales: 0, output: 0, bytes: 0, pose: 0 };
    for (const scale of memory.scales) worst.packing = Math.max(worst.packing, apart(scale.floats, arrays[`packed_${scale.name}`]));
    const [num, numAxes] = facts.arrays.raw.shape;
    const size = 3 * facts.height * facts.width;
    let differing = 0;
    for (let k = 0; k < num; k++) {
      const scaled = scaleActions(arrays.raw.subarray(k * numAxes, (k + 1) * numAxes), facts.axes);
      worst.scales = Math.max(worst.scales, apart(scaled, arrays.scaled.subarray(k * numAxes, (k + 1) * numAxes)));
      const [frame, pose] = await this.run(memory, scaled, arrays.noise);
      const kept = facts.floats_at.indexOf(k);
      // Outputs are compared as pixels clamped to [-1, 1], before rounding.
      if (kept >= 0) worst.output = Math.max(worst.output, apart(frame, arrays.floats.subarray(kept * size, (kept + 1) * size), 1));
      const golden = planes(arrays.frames.subarray(k * size, (k + 1) * size));
      for (let i = 0; i < size; i++) {
        const off = Math.abs(toByte(frame[i]) - golden[i]);
        worst.bytes = Math.max(worst.bytes, off);
        differing += off > 0;
      }
      memory.push(golden, pose);
    }
    if (memory.pose) worst.pose = apart(memory.pose, arrays.last_pose);
    for (const scale of memory.scales.slice(1)) worst.packing = Math.max(worst.packing, apart(scale.floats, arrays[`last_${scale.name}`]));
    const share = differing / (num * size);
    // A value on the border of two levels may round either way.
    const ok = worst.packing < 1e-6 && worst.scales < 1e-6 && worst.output < facts.tolerance && worst.bytes <= 1 && share < 1e-3 &&
      worst.pose < 1e-4;
    const text = `${num} steps, output within ${worst.output.toExponential(1)}, packing ${worst.packing.toExponential(1)}, ` +
      `scales ${worst.scales.toExponential(1)}, ${(100 * share).toFixed(4)} % of bytes differ`;
    return { ok, text, runtime: this.runtime, ...worst, share };
  }

  memoryOf(seed) {
    const { facts, arrays } = this;
    const memory = new Memory(facts.scales, facts.height, facts.width);
    memory.start(memory.scales.map((scale) => {
      const size = scale.bytes.length;
      return arrays[`seed_${scale.name}`].subarray(seed * size, (seed + 1) * size);
    }));
    if (arrays.seed_pose) memory.pose = arrays.seed_pose.slice(seed * 12, (seed + 1) * 12);
    return memory;
  }

  send(message) {
    this.busy = this.busy.then(() => this.act(message)).catch((error) => this.handlers.error(error.message, false, message.id));
  }

  async act(message) {
    const begun = performance.now();
    if (message.do === "reset") {
      Object.assign(this, { memory: this.memoryOf(message.seed), seed: message.seed, steps: 0 });
      this.action = this.facts.axes.map(() => 0);
    } else if (message.do === "step") {
      const turn = this.locked ? 0 : this.steps;
      const noise = normals(1e6 * this.seed + turn, this.facts.height * this.facts.width);
      const [frame, pose] = await this.run(this.memory, scaleActions(message.controls, this.facts.axes), noise);
      this.memory.push(Uint8Array.from(frame, toByte), pose);
      this.action = message.controls;
      this.steps += 1;
    } else if (message.do === "set" && message.locked !== undefined) this.locked = message.locked;
    const images = [{ kind: "rollout", num: 1, image: toImage(this.memory.newest(), this.facts.height, this.facts.width) }];
    if (message.memory) images.push(...this.memory.scales.map(sideBySide));
    const header = { id: message.id, action: this.action, seed: this.seed, steps: this.steps };
    this.handlers.frame({ ...header, ms: message.do === "step" ? performance.now() - begun : undefined }, images);
  }
}

async function fetched(name, kind) {
  const answer = await fetch(`./${name}`);
  if (!answer.ok) throw new Error(`${name} is missing beside this page; export the run again`);
  return answer[kind]();
}

function views(places, data) {
  const kinds = { uint8: Uint8Array, float32: Float32Array };
  return Object.fromEntries(Object.entries(places).map(([name, { at, dtype, shape }]) => {
    return [name, new kinds[dtype](data, at, shape.reduce((a, b) => a * b, 1))];
  }));
}

function apart(a, b, within = Infinity) {
  if (a.length !== b.length) return Infinity;
  const inside = (value) => Math.min(within, Math.max(-within, value));
  let worst = 0;
  for (let i = 0; i < a.length; i++) worst = Math.max(worst, Math.abs(inside(a[i]) - inside(b[i])));
  return worst;
}

// [H, W, 3] to [3, H, W].
function planes(image) {
  const size = image.length / 3;
  return Uint8Array.from({ length: image.length }, (_, i) => image[(i % size) * 3 + Math.floor(i / size)]);
}

// The frames of one scale side by side, oldest left.
function sideBySide(scale) {
  const image = new ImageData(scale.num * scale.w, scale.h);
  for (let n = 0; n < scale.num; n++) {
    for (let c = 0; c < 3; c++) {
      for (let y = 0; y < scale.h; y++) {
        for (let x = 0; x < scale.w; x++) {
          const at = 4 * (y * image.width + n * scale.w + x);
          image.data[at + c] = scale.bytes[((n * 3 + c) * scale.h + y) * scale.w + x];
          image.data[at + 3] = 255;
        }
      }
    }
  }
  return { kind: "memory", num: scale.num, image };
}
