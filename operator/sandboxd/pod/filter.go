package pod

import (
	"fmt"
	"runtime"
	"slices"
	"syscall"
	"unsafe"
)

const (
	setFilter   = 1 // SECCOMP_SET_MODE_FILTER
	allThreads  = 1 // SECCOMP_FILTER_FLAG_TSYNC
	resultKill  = 0x80000000
	resultErrno = 0x00050000
	resultAllow = 0x7fff0000

	loadWord    = 0x20 // BPF_LD | BPF_W | BPF_ABS
	jumpEqual   = 0x15
	jumpAtLeast = 0x35
	jumpAnyBit  = 0x45
	giveBack    = 0x06 // BPF_RET

	atNumber, atArch, atFirst = 0, 4, 16 // in struct seccomp_data; the low half of an argument comes first
	x32Bit                    = 0x40000000

	// newNamespaces are the flags of clone and unshare for a namespace of any kind: CLONE_NEWTIME too, which clone
	// takes for a signal.
	newNamespaces = 0x7e020000
	newTime       = 0x80
	sysClone3     = 435 // on every architecture
)

// instruction is the kernel's struct sock_filter.
type instruction struct {
	code      uint16
	yes, no   uint8
	parameter uint32
}

// platform is what differs between architectures: the tag of the ABI, and the numbers of system calls.
type platform struct {
	arch           uint32
	x32            bool
	seccomp        uintptr
	clone, unshare uint32
	refused        []uint32
}

// Calls with one number everywhere: open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, mount_setattr,
// quotactl_fd, open_tree_attr, io_uring_setup, _enter and _register.
var everywhere = []uint32{428, 429, 430, 431, 432, 433, 442, 443, 467, 425, 426, 427}

// The others are mount, umount2, pivot_root, setns, swapon, swapoff, reboot, acct, syslog, init_module,
// finit_module, delete_module, kexec_load, kexec_file_load, bpf, perf_event_open, fanotify_init, quotactl,
// open_by_handle_at, add_key, request_key, keyctl, userfaultfd, settimeofday, clock_settime.
var platforms = map[string]platform{
	"amd64": {arch: 0xc000003e, x32: true, seccomp: 317, clone: 56, unshare: 272, refused: []uint32{165, 166, 155, 308,
		167, 168, 169, 163, 103, 175, 313, 176, 246, 320, 321, 298, 300, 179, 304, 248, 249, 250, 323, 164, 227}},
	"arm64": {arch: 0xc00000b7, seccomp: 277, clone: 220, unshare: 97, refused: []uint32{40, 39, 41, 268,
		224, 225, 142, 89, 116, 105, 273, 106, 104, 294, 280, 241, 262, 60, 265, 217, 218, 219, 282, 170, 112}},
}

// program refuses what makes a namespace, a mount or a key, and what only serves to attack a kernel. Another ABI than
// the machine's own has other numbers: its programs are killed.
func (p platform) program() []instruction {
	refuse := func(errno syscall.Errno) instruction {
		return instruction{code: giveBack, parameter: resultErrno | uint32(errno)}
	}
	lines := []instruction{
		{code: loadWord, parameter: atArch},
		{code: jumpEqual, yes: 1, parameter: p.arch},
		{code: giveBack, parameter: resultKill},
		{code: loadWord, parameter: atNumber},
	}
	if p.x32 {
		lines = append(lines, instruction{code: jumpAtLeast, no: 1, parameter: x32Bit}, refuse(syscall.ENOSYS))
	}
	for _, number := range slices.Concat(everywhere, p.refused) {
		lines = append(lines, instruction{code: jumpEqual, no: 1, parameter: number}, refuse(syscall.EPERM))
	}
	// Its flags are in memory, which a filter does not see: a C library falls back to clone.
	lines = append(lines, instruction{code: jumpEqual, no: 1, parameter: sysClone3}, refuse(syscall.ENOSYS))
	for _, call := range []struct{ number, flags uint32 }{{p.clone, newNamespaces}, {p.unshare, newNamespaces | newTime}} {
		lines = append(lines,
			instruction{code: jumpEqual, no: 4, parameter: call.number},
			instruction{code: loadWord, parameter: atFirst},
			instruction{code: jumpAnyBit, no: 1, parameter: call.flags}, refuse(syscall.EPERM),
			instruction{code: giveBack, parameter: resultAllow})
	}
	return append(lines, instruction{code: giveBack, parameter: resultAllow})
}

// filter is for every thread, and for all that they start.
func filter() error {
	p, known := platforms[runtime.GOARCH]
	if !known {
		return fmt.Errorf("seccomp: no filter for %s", runtime.GOARCH)
	}
	lines := p.program()
	program := struct {
		length uint16
		lines  *instruction
	}{uint16(len(lines)), unsafe.SliceData(lines)}
	thread, _, errno := syscall.Syscall(p.seccomp, setFilter, allThreads, uintptr(unsafe.Pointer(&program)))
	runtime.KeepAlive(lines)
	if errno != 0 || thread != 0 {
		return fmt.Errorf("seccomp: %w (thread %d)", errno, thread)
	}
	return nil
}
