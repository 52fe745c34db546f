// Mean and standard deviation of several runs; nothing where fewer than two have a number.

export function mean(values) {
  const known = values.filter((value) => typeof value === "number" && Number.isFinite(value));
  if (known.length < 2) return known.length ? { mean: known[0], sd: null } : undefined;
  const middle = known.reduce((a, b) => a + b, 0) / known.length;
  const sd = Math.sqrt(known.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (known.length - 1));
  return { mean: middle, sd };
}
