package proc

import (
	"io"
	"os"
	"syscall"
)

// streams are the three pipes of one command, both ends. The child's ends are bare descriptors: the runtime
// would watch them, and make them non-blocking.
type streams struct {
	child    [3]int   // standard input, output and error; -1 once closed
	input    *os.File // nil when there is nothing to write
	out, err *os.File
}

func openStreams(stdin string) (s *streams, err error) {
	s = &streams{child: [3]int{-1, -1, -1}}
	if stdin == "" {
		s.child[0], err = syscall.Open(os.DevNull, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	} else {
		s.child[0], s.input, err = pipe(0)
	}
	if err == nil {
		s.child[1], s.out, err = pipe(1)
	}
	if err == nil {
		s.child[2], s.err, err = pipe(1)
	}
	if err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// pipe returns both ends of a new one; the child's is the end of that number.
func pipe(childs int) (child int, ours *os.File, err error) {
	var ends [2]int
	if err := syscall.Pipe2(ends[:], syscall.O_CLOEXEC); err != nil {
		return -1, nil, os.NewSyscallError("pipe2", err)
	}
	if err := syscall.SetNonblock(ends[1-childs], true); err != nil {
		syscall.Close(ends[0])
		syscall.Close(ends[1])
		return -1, nil, os.NewSyscallError("fcntl", err)
	}
	return ends[childs], os.NewFile(uintptr(ends[1-childs]), "pipe"), nil
}

// run is called once the child has its ends: ours must not hold its pipes open.
func (s *streams) run(spec Spec) (drained <-chan struct{}) {
	s.closeChild()
	if s.input != nil {
		go func() {
			_, _ = io.WriteString(s.input, spec.Stdin) // a command need not read it
			s.input.Close()
		}()
	}
	return drain(s.out, s.err, spec)
}

// stopStdin ends a writer that nobody reads from.
func (s *streams) stopStdin() {
	if s.input != nil {
		s.input.Close()
	}
}

func (s *streams) closeChild() {
	for at, end := range s.child {
		if end >= 0 {
			syscall.Close(end)
			s.child[at] = -1
		}
	}
}

func (s *streams) close() {
	s.closeChild()
	for _, end := range []*os.File{s.input, s.out, s.err} {
		if end != nil {
			end.Close()
		}
	}
}
