"""Solve for the Lloyd-Max codebooks and write them as JSON or as a C header.

Without options, writes kvcodec/reference/data/codebooks.json. With --check, compares that file
with a fresh solution. With --c-header FILE, writes what is shipped as a C99 header for engines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from kvcodec.codebook import BITS, HEAD_DIMS, Codebook, from_record
from kvcodec.reference.codebook_solver import distortion, lloyd_max, snap

DATA = Path(__file__).resolve().parents[1] / "kvcodec" / "reference" / "data" / "codebooks.json"

# Special functions differ in their last bits between versions of libm and SciPy.
TOLERANCE = 1e-12

DESCRIPTION = (
    "Lloyd-Max codebooks of a coordinate of a uniform unit vector, by head_dim and bits: the "
    "positive halves of the centroids and of the integer levels, the step of the levels, and the "
    "mean squared errors times head_dim. Written by tools/gen_codebooks.py."
)

Record = dict[str, Any]
Tables = dict[str, dict[str, Record]]

HEADER = """\
/* Lloyd-Max codebooks for the coordinates of a randomly rotated unit vector.
 *
 * Written by tools/gen_codebooks.py of kvcodec; do not edit. C99, no other files are needed.
 *
 * To quantize a vector x of head_dim coordinates, rotate it, then with
 *
 *     const kvcodec_codebook *book = kvcodec_find_codebook(head_dim, bits);
 *     double unit = norm * book->step;
 *
 * where norm is the Euclidean norm of x, the code of x[i] is the number of boundaries less than
 * x[i] / unit:
 *
 *     int code = 0;
 *     while (code < book->num_levels - 1 && book->boundaries[code] < x[i] / unit) ++code;
 *
 * The code stands for the value book->levels[code] * unit. A dot product with a code vector is
 * therefore a sum of products with int8 levels, multiplied by unit once. A zero vector has no
 * direction: store norm = 0 and any codes.
 *
 * For the very codes of kvcodec, round unit to float and then up to the next bfloat16 (or not, for
 * float32 scales), and compare the boundaries with the float product x[i] * (1.0f / unit).
 */
#ifndef KVCODEC_CODEBOOKS_H
#define KVCODEC_CODEBOOKS_H

#include <stddef.h>
#include <stdint.h>

typedef struct kvcodec_codebook {
    int head_dim;          /* dimension of the vectors */
    int bits;              /* bits of a code */
    int num_levels;        /* 2^bits, the number of entries that are used below */
    double boundaries[15]; /* num_levels - 1 boundaries, ascending, in units of step */
    double centroids[16];  /* optimal values on the unit sphere, before snapping to levels */
    int8_t levels[16];     /* values in units of step, ascending */
    double step;           /* size of one level for a vector of norm 1 */
    double mse;            /* mean squared error of a vector of norm 1 */
} kvcodec_codebook;

#define KVCODEC_NUM_CODEBOOKS %(count)d

static const kvcodec_codebook kvcodec_codebooks[KVCODEC_NUM_CODEBOOKS] = {
%(entries)s
};

/* Return the codebook, or NULL if there is none for this head_dim and bits. */
static inline const kvcodec_codebook *kvcodec_find_codebook(int head_dim, int bits)
{
    int i;
    for (i = 0; i < KVCODEC_NUM_CODEBOOKS; ++i) {
        const kvcodec_codebook *book = &kvcodec_codebooks[i];
        if (book->head_dim == head_dim && book->bits == bits) {
            return book;
        }
    }
    return NULL;
}

#endif /* KVCODEC_CODEBOOKS_H */
"""


def solve(head_dim: int, bits: int) -> Record:
    """Solve for one codebook."""
    centroids = lloyd_max(head_dim, bits)
    levels, step = snap(head_dim, centroids)
    return {
        "centroids": centroids.tolist(),
        "levels": levels.tolist(),
        "step": step,
        "mse": float(distortion(head_dim, levels * step)),
        "unsnapped_mse": float(distortion(head_dim, centroids)),
    }


def solve_all() -> Tables:
    """Solve for every codebook that is shipped."""
    return {str(dim): {str(bits): solve(dim, bits) for bits in BITS} for dim in HEAD_DIMS}


def to_json(tables: Tables) -> str:
    """Format the tables with one codebook a line, so that differences are easy to read."""
    groups = []
    for dim, books in tables.items():
        lines = ",\n".join(f'   "{bits}": {json.dumps(book)}' for bits, book in books.items())
        groups.append(f'  "{dim}": {{\n{lines}\n  }}')
    body = ",\n".join(groups)
    return f'{{\n "description": {json.dumps(DESCRIPTION)},\n "codebooks": {{\n{body}\n }}\n}}\n'


def read(path: Path) -> Any:
    """Read the tables from a file that ``to_json`` formatted."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))["codebooks"]
    except FileNotFoundError:
        raise click.ClickException(f"{path} does not exist") from None
    except (ValueError, KeyError, TypeError):
        raise click.ClickException(f"{path} is not a file of codebooks") from None


def differences(expected: Any, found: Any, where: str = "") -> Iterator[str]:
    """Yield a line for each value that differs: integers exactly, floats beyond TOLERANCE."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in expected | found:
            place = f"{where}, {key}" if where else f"head_dim {key}"
            if key not in found:
                yield f"{place}: missing"
            elif key not in expected:
                yield f"{place}: not expected"
            else:
                yield from differences(expected[key], found[key], place)
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for index, (left, right) in enumerate(zip(expected, found, strict=True)):
            yield from differences(left, right, f"{where}[{index}]")
    elif isinstance(expected, float) and isinstance(found, float):
        if not math.isclose(expected, found, rel_tol=TOLERANCE):
            yield f"{where}: found {found!r}, expected {expected!r}"
    elif type(expected) is not type(found) or expected != found:
        yield f"{where}: found {found!r}, expected {expected!r}"


def c_entry(book: Codebook) -> str:
    """Format one codebook as a C initializer."""

    def braces(values: list[float] | list[int]) -> str:
        return "{" + ", ".join(map(repr, values)) + "}"

    return (
        f"    {{{book.head_dim}, {book.bits}, {book.levels.size},\n"
        f"     {braces(book.boundaries.tolist())},\n"
        f"     {braces(book.centroids.tolist())},\n"
        f"     {braces(book.levels.tolist())},\n"
        f"     {book.step!r}, {book.mse!r}}}"
    )


def to_c_header(tables: Tables) -> str:
    """Format the tables as a self-contained C99 header."""
    entries = [
        c_entry(from_record(int(dim), int(bits), record))
        for dim, books in tables.items()
        for bits, record in books.items()
    ]
    return HEADER % {"count": len(entries), "entries": ",\n".join(entries)}


@click.command()
@click.option("--check", is_flag=True, help="Compare the data with a fresh solution; write none.")
@click.option(
    "--c-header",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the data as a C99 header instead of solving anew.",
)
@click.option(
    "--data",
    type=click.Path(dir_okay=False, path_type=Path),
    default=DATA,
    metavar="FILE",
    help="JSON file to write, check or convert.  [default: the one in the package]",
)
def main(check: bool, c_header: Path | None, data: Path) -> None:
    """Solve for the Lloyd-Max codebooks that kvcodec ships.

    With --check, the exit status is 1 if the data differ from a fresh solution: integers must be
    equal, floats agree to a relative 1e-12.
    """
    if check:
        lines = list(differences(solve_all(), read(data)))
        if lines:
            shown = "\n".join(f"  {line}" for line in lines[:10])
            more = f"\n  and {len(lines) - 10} more" if len(lines) > 10 else ""
            raise click.ClickException(
                f"{data} differs from what tools/gen_codebooks.py would write:\n{shown}{more}"
            )
        click.echo(f"{data} is up to date")
    elif c_header is None:
        data.write_text(to_json(solve_all()), encoding="utf-8")
        click.echo(f"wrote {data}")
    if c_header is not None:
        c_header.write_text(to_c_header(read(data)), encoding="utf-8")
        click.echo(f"wrote {c_header}")


if __name__ == "__main__":
    main()
