"""Compiles a CUDA C++ file to PTX: nvrtc.py LIBNVRTC SOURCE PTX [OPTION...]

Run in the source's directory, and with its bare name, no path of this machine comes into the PTX. The compiler's log,
with its warnings, goes to standard error; the exit status is 1 where there is no PTX.
"""

import ctypes
import sys


def main(library, source, ptx, *options):
    nvrtc = ctypes.CDLL(library)
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p

    def call(name, *args):
        status = getattr(nvrtc, name)(*args)
        if status != 0:
            sys.exit(f"{name}: {nvrtc.nvrtcGetErrorString(status).decode()}")

    def text(what):
        """The program's PTX or log; both end with a NUL that is counted."""
        size = ctypes.c_size_t()
        call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        call(f"nvrtcGet{what}", program, buffer)
        return buffer.value

    with open(source, "rb") as file:
        code = file.read()
    program = ctypes.c_void_p()
    call("nvrtcCreateProgram", ctypes.byref(program), code, source.encode(), 0, None, None)
    arguments = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    failed = nvrtc.nvrtcCompileProgram(program, len(options), arguments) != 0
    log = text("ProgramLog").decode(errors="replace").strip()
    if log:
        print(log, file=sys.stderr)
    if failed:
        sys.exit(1)
    with open(ptx, "wb") as file:
        file.write(text("PTX"))


if __name__ == "__main__":
    main(*sys.argv[1:])
