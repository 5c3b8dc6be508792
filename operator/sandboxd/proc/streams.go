package proc

import (
	"io"
	"os"
)

// streams are the three pipes of one command, both ends.
type streams struct {
	stdin, stdout, stderr *os.File // the child's ends
	input                 *os.File // nil when there is nothing to write
	out, err              *os.File
}

func openStreams(stdin string) (*streams, error) {
	s := &streams{}
	var err error
	if stdin == "" {
		s.stdin, err = os.Open(os.DevNull)
	} else {
		s.stdin, s.input, err = os.Pipe()
	}
	if err == nil {
		s.out, s.stdout, err = os.Pipe()
	}
	if err == nil {
		s.err, s.stderr, err = os.Pipe()
	}
	if err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// childEnds gives the descriptors to a child; Fd puts them in blocking mode, which it expects.
func (s *streams) childEnds() [3]uintptr {
	return [3]uintptr{s.stdin.Fd(), s.stdout.Fd(), s.stderr.Fd()}
}

// run is called once the child has its ends: ours must not hold its pipes open.
func (s *streams) run(spec Spec) (stdout, stderr <-chan struct{}) {
	for _, end := range []*os.File{s.stdin, s.stdout, s.stderr} {
		end.Close()
	}
	if s.input != nil {
		go func() {
			_, _ = io.WriteString(s.input, spec.Stdin) // a command need not read it
			s.input.Close()
		}()
	}
	return collect(s.out, spec.Stdout), collect(s.err, spec.Stderr)
}

// stopStdin ends a writer that nobody reads from.
func (s *streams) stopStdin() {
	if s.input != nil {
		s.input.Close()
	}
}

func (s *streams) close() {
	for _, end := range []*os.File{s.stdin, s.stdout, s.stderr, s.input, s.out, s.err} {
		if end != nil {
			end.Close()
		}
	}
}
