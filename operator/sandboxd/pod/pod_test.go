package pod

import (
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestMapLeavesOutTheKeeperAlone(t *testing.T) {
	for name, c := range map[string]struct {
		ids  []idRange
		want [][2]int // first, count
	}{
		"a pod with a user namespace": {[]idRange{{0, 65536}}, [][2]int{{0, 65535}}},
		"a pod without":               {[]idRange{{0, 4294967295}}, [][2]int{{0, 65535}, {65536, 4294901759}}},
		"beside it":                   {[]idRange{{0, 10}, {70000, 5}}, [][2]int{{0, 10}, {70000, 5}}},
		"at its edges":                {[]idRange{{0, 65535}, {65535, 1}, {65536, 1}}, [][2]int{{0, 65535}, {65536, 1}}},
	} {
		var got [][2]int
		for _, m := range without(keeperID, c.ids) {
			if m.ContainerID != m.HostID {
				t.Errorf("%s: %+v", name, m)
			}
			got = append(got, [2]int{m.HostID, m.Size})
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

func TestIDsAreReadFromTheKernelsTable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "map")
	if err := os.WriteFile(path, []byte("         0     200000      65535\n     65536     265536          1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	ids, err := readIDs(path)
	if err != nil || !slices.Equal(ids, []idRange{{0, 65535}, {65536, 1}}) {
		t.Error(ids, err)
	}
}

// verdict runs a filter as the kernel does.
func verdict(t *testing.T, program []instruction, arch, number, first uint32) uint32 {
	t.Helper()
	fields := map[uint32]uint32{atArch: arch, atNumber: number, atFirst: first}
	loaded := uint32(0)
	for at := 0; at < len(program); at++ {
		line := program[at]
		jump := func(yes bool) {
			if yes {
				at += int(line.yes)
			} else {
				at += int(line.no)
			}
		}
		switch line.code {
		case loadWord:
			value, known := fields[line.parameter]
			if !known {
				t.Fatalf("line %d loads from %d", at, line.parameter)
			}
			loaded = value
		case jumpEqual:
			jump(loaded == line.parameter)
		case jumpAtLeast:
			jump(loaded >= line.parameter)
		case jumpAnyBit:
			jump(loaded&line.parameter != 0)
		case giveBack:
			return line.parameter
		default:
			t.Fatalf("line %d: code %x", at, line.code)
		}
	}
	t.Fatal("the program has no end")
	return 0
}

func TestFilterRefusesNamespacesMountsAndOtherABIs(t *testing.T) {
	eperm, enosys := resultErrno|uint32(syscall.EPERM), resultErrno|uint32(syscall.ENOSYS)
	for name, p := range platforms {
		program := p.program()
		if len(program) > 4096 {
			t.Errorf("%s: %d lines", name, len(program))
		}
		try := func(what string, want, number, first uint32) {
			t.Helper()
			if got := verdict(t, program, p.arch, number, first); got != want {
				t.Errorf("%s: %s: %x, want %x", name, what, got, want)
			}
		}
		for _, number := range slices.Concat(everywhere, p.refused) {
			try("a refused call", eperm, number, 0)
		}
		const thread, newUser, newTimeFlag = 0x3d0f00, 0x10000000, 0x80
		try("a thread", resultAllow, p.clone, thread)
		try("fork", resultAllow, p.clone, uint32(syscall.SIGCHLD))
		try("clone with a namespace", eperm, p.clone, newUser|uint32(syscall.SIGCHLD))
		try("unshare of open files", resultAllow, p.unshare, 0x400)
		try("unshare of a namespace", eperm, p.unshare, newUser)
		try("unshare of time", eperm, p.unshare, newTimeFlag)
		try("clone3", enosys, sysClone3, 0)
		try("an ordinary call", resultAllow, 1, newUser)
		if got := verdict(t, program, 0x40000003, 1, 0); got != resultKill { // i386
			t.Errorf("%s: another ABI: %x", name, got)
		}
		if p.x32 {
			try("x32", enosys, x32Bit|1, 0)
		}
	}
}

func TestPathsAreReadAsTheKernelWritesThem(t *testing.T) {
	for given, want := range map[string]string{`/a\040b`: "/a b", `/a\134040`: `/a\040`, `/\011\012`: "/\t\n", "/plain": "/plain"} {
		if got := unescape(given); got != want {
			t.Errorf("%q: %q, want %q", given, got, want)
		}
	}
}

func TestOverlayOptionsAreEscaped(t *testing.T) {
	if got := escaped.Replace(`/a:b,c\d`); got != `/a\:b\,c\\d` {
		t.Error(got)
	}
}

func TestFolderWithAMountInItIsRebuilt(t *testing.T) {
	b := &builder{mounts: []string{"/", "/etc/hosts", "/data"}}
	for path, want := range map[string]bool{"/etc": true, "/data": false, "/et": false, "/usr": false, "/etc/hosts": false} {
		if b.mountBelow(path) != want {
			t.Errorf("%s: %v", path, !want)
		}
	}
}

func TestMissingFoldersAreMadeWithTheTimeOfWhatIsAbove(t *testing.T) {
	root := t.TempDir()
	if err := os.MkdirAll(root+"/home", 0o755); err != nil {
		t.Fatal(err)
	}
	past := time.Unix(1_000_000, 0)
	for _, folder := range []string{root + "/home", root} {
		if err := os.Chtimes(folder, past, past); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if err := makeFolders(root, "/home/a/b/"); err != nil {
			t.Fatal(err)
		}
	}
	for _, folder := range []string{"", "/home", "/home/a", "/home/a/b"} {
		info, err := os.Stat(root + folder)
		if err != nil || !info.ModTime().Equal(past) {
			t.Errorf("%q: %v %v", folder, info, err)
		}
	}
	if info, _ := os.Stat(root + "/home/a/b"); info.Mode().Perm() != openMode {
		t.Error(info.Mode())
	}
	if err := os.WriteFile(root+"/file", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/file", "/file/x"} {
		if err := makeFolders(root, path); err == nil {
			t.Errorf("%s: no error", path)
		}
	}
}

// world is one without processes.
type world struct {
	killed          int
	left, kill, odd error
}

func (w *world) Kill() error                   { w.killed++; return w.kill }
func (w *world) Left(int, time.Duration) error { return w.left }
func (w *world) Verify() error                 { return w.odd }

func TestAnswerIsAWholeResponseOfHTTP(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	client, err := net.Dial("tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	accepted, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	file, err := accepted.(*net.TCPConn).File()
	if err != nil {
		t.Fatal(err)
	}
	accepted.Close()
	k := &Keeper{Order: Order{Kind: kinds[0]}, Incarnation: 7}
	k.answer(file, time.Now(), nil)
	_ = client.SetReadDeadline(time.Now().Add(5 * time.Second))
	var all []byte
	buffer := make([]byte, 1024)
	for {
		n, err := client.Read(buffer)
		all = append(all, buffer[:n]...)
		if err != nil {
			break
		}
	}
	head, body, _ := strings.Cut(string(all), "\r\n\r\n")
	var told report
	if err := json.Unmarshal([]byte(body), &told); err != nil || !strings.HasPrefix(head, "HTTP/1.1 200 OK\r\n") {
		t.Fatal(string(all), err)
	}
	if !told.Clean || told.Incarnation != 7 || told.Method != Overlay || !strings.Contains(head, "Connection: close") {
		t.Error(string(all))
	}
}

// pair is a keeper with a sandbox that the test plays.
func pair(t *testing.T, w *world) (*Keeper, *net.UnixConn) {
	t.Helper()
	ours, theirs, err := socketPair()
	if err != nil {
		t.Fatal(err)
	}
	played, err := net.FileConn(theirs)
	if err != nil {
		t.Fatal(err)
	}
	theirs.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ours.Close(); played.Close(); null.Close() })
	return &Keeper{World: w, Incarnation: 1, now: &process{control: ours, stdin: null}}, played.(*net.UnixConn)
}

func TestOnlyAWellFormedRequestHasAnAsker(t *testing.T) {
	for name, c := range map[string]struct {
		sent  string
		with  bool
		asker bool
	}{
		"a request":              {`{"replace":true}`, true, true},
		"none to answer":         {`{"replace":true}`, false, false},
		"another word":           {`{"incarnation":9}`, true, false},
		"no JSON":                {`{`, true, false},
		"more than there can be": {`{"problem":"` + strings.Repeat("x", maxMessage) + `"}`, true, false},
	} {
		k, played := pair(t, &world{})
		var rights []byte
		if c.with {
			rights = syscall.UnixRights(0)
		}
		if _, _, err := played.WriteMsgUnix([]byte(c.sent), rights, nil); err != nil {
			t.Fatal(name, err)
		}
		asker := k.wait()
		if (asker != nil) != c.asker {
			t.Errorf("%s: %v", name, asker)
		}
		if asker != nil {
			asker.Close()
		}
	}
	k, played := pair(t, &world{})
	played.Close()
	if k.wait() != nil {
		t.Error("a sandbox that has ended has an asker")
	}
}

func TestSandboxThatDoesNotDieIsTheLast(t *testing.T) {
	k, played := pair(t, &world{kill: syscall.EPERM})
	played.Close()
	if err := k.Run(); err != syscall.EPERM {
		t.Error(err)
	}
}

func TestFolderIsCopiedIfItsCopyIsSmall(t *testing.T) {
	folder := t.TempDir()
	if err := os.MkdirAll(folder+"/a/b", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.WriteFile(folder+"/a/b/file", make([]byte, pageBytes+1), 0o600), os.Symlink("a", folder+"/link")); err != nil {
		t.Fatal(err)
	}
	const want = 5*entryBytes + 2*pageBytes // with the folder itself
	if size, fits := treeBytes(folder, want); size != want || !fits {
		t.Error(size, fits)
	}
	if _, fits := treeBytes(folder, want-1); fits {
		t.Error("what is too large fits")
	}
	if err := syscall.Mkfifo(folder+"/a/fifo", 0o600); err != nil {
		t.Fatal(err)
	}
	if _, fits := treeBytes(folder, 1<<20); fits {
		t.Error("a pipe fits")
	}
	if _, fits := treeBytes(folder+"/none", 1<<20); fits {
		t.Error("what is not there fits")
	}
}

func TestPathIsOnAVolumeBelowItsMount(t *testing.T) {
	b := &builder{mounts: []string{"/", "/data", "/etc/hosts"}}
	for path, want := range map[string]bool{"/data": true, "/data/x": true, "/database": false, "/etc": false, "/": false} {
		if b.onVolume(path) != want {
			t.Errorf("%s: %v", path, !want)
		}
	}
}

func TestAnyNumberOfFilesIsDelivered(t *testing.T) {
	for _, number := range []int{1, filesAtOnce, 2*filesAtOnce + 1} {
		k, played := pair(t, &world{})
		if err := sendFiles(played, make([]int, number)); err != nil { // of the standard input
			t.Fatal(err)
		}
		files, err := k.now.deliver()
		if err != nil || len(files) != number {
			t.Fatal(len(files), err)
		}
		for _, file := range files {
			if flags, _, errno := syscall.Syscall(syscall.SYS_FCNTL, file.Fd(), syscall.F_GETFD, 0); errno != 0 || flags&syscall.FD_CLOEXEC == 0 {
				t.Fatal("a sandbox would inherit it")
			}
		}
		closeAll(files)
	}
	k, played := pair(t, &world{})
	if err := (&Link{played}).Fail(syscall.ENOSPC); err != nil {
		t.Fatal(err)
	}
	if _, err := k.now.deliver(); err == nil || err.Error() != syscall.ENOSPC.Error() {
		t.Error(err)
	}
}

func TestLaunchSaysWhatTheKernelRefused(t *testing.T) {
	told, err := shared()
	if err != nil {
		t.Fatal(err)
	}
	defer told.unmap()
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	argv, _ := syscall.SlicePtrFromStrings([]string{"x"})
	l := &launch{program: null.Fd(), outcome: told, argv: argv, count: 1} // whose namespace is no namespace
	l.spaces[0] = null.Fd()
	pid, err := l.run()
	if err != nil {
		t.Fatal(err)
	}
	var status syscall.WaitStatus
	if _, err := syscall.Wait4(pid, &status, 0, nil); err != nil || status.ExitStatus() != lostProcess {
		t.Error(err, status)
	}
	if err := failed(told); err == nil || !errors.Is(err, syscall.EINVAL) || !strings.HasPrefix(err.Error(), "setns: ") {
		t.Error(err)
	}
}

func TestChangeOfAFolderBelowIsSeen(t *testing.T) {
	path := t.TempDir()
	folder, err := os.OpenFile(path, openPath, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer folder.Close()
	b := &base{lower: []*os.File{folder}}
	if b.was, err = b.stamps(); err != nil || b.verify() != nil {
		t.Fatal(err, b.verify())
	}
	time.Sleep(20 * time.Millisecond) // a tick of the kernel's clock
	if err := os.WriteFile(path+"/new", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := b.verify(); err == nil || !strings.HasPrefix(err.Error(), "lower: ") {
		t.Error(err)
	}
}
