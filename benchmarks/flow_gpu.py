"""flow on one GPU: images per second at S/2 and at the seed's 256-pixel shape with its narrow heads and with wide ones.

Limits on one H200: 8,900 images/s for S/2 at 32 pixels, batch 256 (SiT compiled gave 6,836 there); 7.8 for `seed-256`, which is
what SiT compiled gave; 20 for its sister with heads of 64. `--only s2-32,seed-256-h4` measures a part.
"""

import argparse

from _jobs import measure
from _report import write_result

# Preset, steps to time, images per second asked for, and what the peer gave.
ROWS = {
    "s2-32": (60, 8900.0, 6836.0),
    "seed-256": (6, 7.8, 7.8),
    "seed-256-h4": (12, 20.0, 7.8),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(ROWS))
    parser.add_argument("settings", nargs="*")
    args = parser.parse_args()
    figures: dict = {"settings": args.settings}
    for preset in args.only.split(","):
        num_steps, wanted, peer = ROWS[preset]
        row = figures[preset] = measure(f"flow/{preset}", args.settings, num_steps) | {"wanted": wanted, "peer": peer}
        speed = row.get("items_per_s", 0.0)
        print(f"{preset:12} {row}", flush=True)
        print(f"{preset:12} {speed:,.1f} images/s: {speed / wanted:.3f} of what is asked for, {speed / peer:.3f} of the peer's")
        write_result("flow-h200", figures)


if __name__ == "__main__":
    main()
