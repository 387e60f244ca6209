"""The system-call filter: a small assembler for classic BPF and the list of calls that are refused.

The filter is a list of refusals, not of permissions: Python, torch and the CUDA driver use most of the table, and
what remains must not reach beyond the sandbox. Sources: seccomp(2), linux/seccomp.h, the arch tables of Linux 6.18.
"""

from __future__ import annotations

import errno
import platform
import struct

# name: (x86_64, aarch64); None where the architecture has no such call
_ALWAYS: dict[str, tuple[int | None, int | None]] = {
    # other processes' memory and descriptors
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "process_mrelease": (448, 448),
    "move_pages": (279, 239), "migrate_pages": (256, 238),
    # mounts and roots
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "swapon": (167, 224), "swapoff": (168, 225),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264), "fanotify_init": (300, 262),
    # namespaces (clone is filtered by its flags below)
    "unshare": (272, 97), "setns": (308, 268),
    # the kernel itself
    "reboot": (169, 142), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "syslog": (103, 116), "acct": (163, 89), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "adjtimex": (159, 171), "clock_adjtime": (305, 266), "sethostname": (170, 161), "setdomainname": (171, 162),
    "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None), "vhangup": (153, 58),
    "lookup_dcookie": (212, 18), "nfsservctl": (180, 42), "memfd_secret": (447, 447),
    # the network, in every form; inherited pipes and socketpair() keep working
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242),
}  # fmt: skip

# Where the host's processes and files stay in sight (no namespaces), these would reach them although Landlock,
# which knows neither file modes nor signals to strangers before ABI 6, says nothing.
_WITHOUT_NAMESPACES: dict[str, tuple[int | None, int | None]] = {
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "chmod": (90, None), "fchmod": (91, 52),
    "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None), "fchown": (93, 55), "lchown": (94, None),
    "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None), "utimensat": (280, 88),
    "futimesat": (261, None), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "setxattrat": (463, 463),
    "removexattrat": (466, 466), "file_setattr": (469, 469), "shmget": (29, 194), "shmat": (30, 196),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "setpriority": (141, 140),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
}  # fmt: skip

# The CUDA driver passes descriptors over an abstract Unix socket of its own (``cuda-uvmfd``) and fails without one.
# Such sockets belong to the network namespace; connecting needs that the namespace is its own.
_UNIX_SOCKET_CALLS = ("bind", "listen", "accept", "accept4")
_AF_UNIX = 1

_OWN_PROCESS_ONLY: dict[str, tuple[int, int]] = {"prlimit64": (302, 261), "sched_setaffinity": (203, 122)}

_CLONE = (56, 220)
_CLONE3 = 435
_IOCTL = (16, 29)
_TERMINAL_INJECTION = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_NAMESPACE_FLAGS = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000

# linux/bpf_common.h
_LOAD_WORD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data


def _op(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, k)


def _refuse(number: int, error: int = errno.EPERM) -> bytes:
    return _op(_JUMP_EQUAL, number, 0, 1) + _op(_RETURN, _ERRNO | error)


def _refuse_if(number: int, argument: int, test: bytes) -> bytes:
    """Refuse call ``number`` when ``test`` (one jump over the refusal) holds for the low word of an argument."""
    body = _op(_LOAD_WORD, _ARGUMENTS + 8 * argument) + test + _op(_RETURN, _ERRNO | errno.EPERM)
    body += _op(_LOAD_WORD, _NUMBER)  # the next rule expects the number again
    return _op(_JUMP_EQUAL, number, 0, len(body) // 8) + body


def supported(machine: str | None = None) -> bool:
    """Whether the filter exists for this processor."""
    return (machine or platform.machine()) in _AUDIT_ARCH


def program(*, namespaces: bool, gpu: bool = False, machine: str | None = None) -> bytes:
    """The filter as an array of ``struct sock_filter``, for prctl(2) or bubblewrap's ``--seccomp``.

    Args:
        namespaces: the process has its own mount and pid namespaces; without them more calls are refused.
        gpu: Unix sockets are allowed, because CUDA does not start without.
        machine: ``x86_64`` or ``aarch64``; this machine's by default.

    Raises:
        KeyError: there is no table for the machine.
    """
    machine = machine or platform.machine()
    column = list(_AUDIT_ARCH).index(machine) if machine in _AUDIT_ARCH else -1
    code = _op(_LOAD_WORD, _ARCH) + _op(_JUMP_EQUAL, _AUDIT_ARCH[machine], 1, 0) + _op(_RETURN, _KILL)
    code += _op(_LOAD_WORD, _NUMBER)
    if machine == "x86_64":  # the x32 table would be a way around every number below
        code += _op(_JUMP_AT_LEAST, _X32_BIT, 0, 1) + _op(_RETURN, _KILL)
    refused = dict(_ALWAYS) if namespaces else {**_ALWAYS, **_WITHOUT_NAMESPACES}
    if gpu:
        for name in ("socket", *_UNIX_SOCKET_CALLS, *(["connect"] if namespaces else [])):
            del refused[name]
        code += _refuse_if(_ALWAYS["socket"][column] or 0, 0, _op(_JUMP_EQUAL, _AF_UNIX, 1, 0))
    for numbers in refused.values():
        number = numbers[column]
        if number is not None:
            code += _refuse(number)
    # clone3 passes its flags in memory, out of the filter's sight: ENOSYS makes libc fall back to clone
    code += _refuse(_CLONE3, errno.ENOSYS)
    code += _refuse_if(_CLONE[column], 0, _op(_JUMP_ANY_BIT, _NAMESPACE_FLAGS, 0, 1))
    for request in _TERMINAL_INJECTION:
        code += _refuse_if(_IOCTL[column], 1, _op(_JUMP_EQUAL, request, 0, 1))
    if not namespaces:
        for pair in _OWN_PROCESS_ONLY.values():
            code += _refuse_if(pair[column], 0, _op(_JUMP_EQUAL, 0, 1, 0))
    return code + _op(_RETURN, _ALLOW)
