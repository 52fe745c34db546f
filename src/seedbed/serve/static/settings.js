// The settings of all runs, which the list reads when a column, a filter or a group needs them.

import { get } from "./dom.js";

export class Settings {
  constructor(changed) {
    Object.assign(this, { changed, found: null, row: new Map() });
  }

  // Once; again after `forget`.
  async load() {
    if (this.found || this.asked) return;
    this.asked = true;
    try {
      const found = await get("/api/settings");
      this.row = new Map(found.names.map((name, i) => [name, i]));
      this.columns = new Map(Object.entries(found.keys));
      this.groups = new Map();
      this.found = found;
    } finally {
      this.asked = false;
    }
    this.changed();
  }

  isReady() {
    return this.found !== null;
  }

  has(name) {
    return !this.found || this.row.has(name);
  }

  // A run has begun since they were read: read again when they are needed, and keep what is known until then.
  forget() {
    if (this.found && !this.late) this.late = setTimeout(() => ((this.found = this.late = null), this.load()), 2000);
  }

  keys() {
    return this.columns ? [...this.columns.keys()] : [];
  }

  varies(key) {
    const { values, at } = this.columns.get(key);
    return values.length > 1 || at.includes(-1);
  }

  value(name, key) {
    const column = this.columns?.get(key),
      at = column?.at[this.row.get(name)];
    return at === undefined || at < 0 ? undefined : column.values[at];
  }

  // Equal for runs whose settings differ in the seed only.
  groupOf(name) {
    const row = this.row.get(name);
    if (row === undefined) return undefined;
    if (!this.groups.has(name)) this.groups.set(name, [...this.columns].map(([key, { at }]) => (key === "seed" ? "" : at[row])).join());
    return this.groups.get(name);
  }
}
