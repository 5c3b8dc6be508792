package pristine

import (
	"bytes"
	"net"
	"os"
	"runtime"
	"syscall"
	"testing"
	"time"
)

func TestCountsOfTheNamespaceAreKept(t *testing.T) {
	table := "sockets: used 9\nTCP: inuse 2 orphan 5 tw 1 alloc 3 mem 4\nUDP: inuse 1 mem 7\nFRAG: inuse 0 memory 0\n"
	want := "TCP: inuse 2\nTCP: tw 1\nUDP: inuse 1\nFRAG: inuse 0\n"
	if got := namespaceCounts([]byte(table)); string(got) != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// inNamespace runs in a thread with a network of its own, which is never used again.
func inNamespace(t *testing.T, run func()) {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		err := syscall.Unshare(syscall.CLONE_NEWNET)
		if err == nil {
			run()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Skip("no network namespace can be made here: ", err)
	}
}

func threadNetwork(t *testing.T) []byte {
	t.Helper()
	var all []byte
	for _, name := range networkCounts {
		content, err := os.ReadFile("/proc/thread-self/net/" + name)
		if err != nil {
			t.Error(err)
		}
		all = append(all, namespaceCounts(content)...)
	}
	return all
}

func TestEverySocketOfANamespaceIsCounted(t *testing.T) {
	inNamespace(t, func() {
		fresh := threadNetwork(t)
		for _, kind := range [][3]int{
			{syscall.AF_INET, syscall.SOCK_STREAM, 0}, {syscall.AF_INET6, syscall.SOCK_STREAM, 0},
			{syscall.AF_INET, syscall.SOCK_DGRAM, 0}, {syscall.AF_INET6, syscall.SOCK_DGRAM, 0},
			{syscall.AF_INET, syscall.SOCK_RAW, syscall.IPPROTO_ICMP},
		} {
			fd, err := syscall.Socket(kind[0], kind[1], kind[2])
			if err != nil {
				t.Log(kind, err)
				continue
			}
			var address syscall.Sockaddr = &syscall.SockaddrInet4{Port: 7}
			if kind[0] == syscall.AF_INET6 {
				address = &syscall.SockaddrInet6{Port: 7}
			}
			if err := syscall.Bind(fd, address); err != nil {
				t.Error(kind, err)
			}
			if kind[1] == syscall.SOCK_STREAM {
				if err := syscall.Listen(fd, 1); err != nil {
					t.Error(kind, err)
				}
			}
			if bytes.Equal(threadNetwork(t), fresh) {
				t.Errorf("%v: is not counted", kind)
			}
			syscall.Close(fd)
			for range 100 {
				if bytes.Equal(threadNetwork(t), fresh) {
					break
				}
				time.Sleep(time.Millisecond)
			}
			if got := threadNetwork(t); !bytes.Equal(got, fresh) {
				t.Errorf("%v: after its end %s", kind, got)
			}
		}
	})
}

func TestSocketOutsideOfTheNamespaceIsNotCounted(t *testing.T) {
	inNamespace(t, func() {
		fresh := threadNetwork(t)
		outside := make(chan net.Listener)
		go func() {
			listener, _ := net.Listen("tcp", "127.0.0.1:0")
			outside <- listener
		}()
		if listener := <-outside; listener != nil {
			defer listener.Close()
		}
		if got := threadNetwork(t); !bytes.Equal(got, fresh) {
			t.Errorf("%s, before %s", got, fresh)
		}
	})
}

func BenchmarkReadNetwork(b *testing.B) {
	for range b.N {
		if _, err := readNetwork(); err != nil {
			b.Fatal(err)
		}
	}
}
