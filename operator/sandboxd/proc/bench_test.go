package proc

import (
	"context"
	"syscall"
	"testing"
)

func BenchmarkRun(b *testing.B) {
	table := opened(b)
	for range b.N {
		spec := shell("")
		spec.Argv = []string{"/bin/true"}
		if _, err := table.Run(context.Background(), spec); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkBareForkAndExec(b *testing.B) {
	for range b.N {
		pid, err := syscall.ForkExec("/bin/true", []string{"/bin/true"}, &syscall.ProcAttr{Files: []uintptr{0, 1, 2}})
		if err != nil {
			b.Fatal(err)
		}
		if _, err := syscall.Wait4(pid, nil, 0, nil); err != nil {
			b.Fatal(err)
		}
	}
}
