package pod

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"syscall"
	"time"
)

// Roles of a process that makes something for its keeper, and ends: the first argument after the flag.
const (
	roleSkeleton = "skeleton"
	roleGround   = "ground"
)

const (
	openPath = 0x200000 // O_PATH
	// lateBytes bounds the files of an ended sandbox that are there for a moment beside those of the next one.
	lateBytes = 64 << 20
)

// base is what all sandboxes of a keeper stand on: their user namespace, and a mount namespace with the skeleton.
// No process is in them but those that make a ground, and sandboxes in the first.
type base struct {
	order   Order
	program *os.File
	null    *os.File
	users   *os.File // nil where sandboxes are in the keeper's own
	mounts  *os.File
	lower   []*os.File // folders of the container that overlays begin at
	was     []stamp    // of these
	outcome *outcome
}

// ground is a root that is mounted, with all namespaces of a sandbox that need no process.
type ground struct {
	spaces []*os.File // the mounts come first
	upper  *os.File
}

// stamp is what a change of a folder's names, mode or owner changes: nobody can set a change time.
type stamp struct {
	mode, uid, gid uint32
	inode          uint64
	changed        syscall.Timespec
}

func newBase(o Order) (b *base, err error) {
	b = &base{order: o}
	defer func() {
		if err != nil {
			b.close()
		}
	}()
	if b.program, err = os.Open("/proc/self/exe"); err != nil {
		return b, err
	}
	if b.null, err = os.Open(os.DevNull); err != nil {
		return b, err
	}
	if b.outcome, err = shared(); err != nil {
		return b, err
	}
	p, err := b.cloneFirst()
	if err != nil {
		return b, err
	}
	files, err := p.deliver()
	if err != nil {
		return b, err
	}
	if o.OwnUsers {
		b.users, files = files[0], files[1:]
	}
	b.mounts, b.lower = files[0], files[1:]
	b.was, err = b.stamps()
	return b, err
}

func (b *base) stamps() ([]stamp, error) {
	all := make([]stamp, len(b.lower))
	for i, folder := range b.lower {
		var st syscall.Stat_t
		if err := syscall.Fstat(int(folder.Fd()), &st); err != nil {
			return nil, fmt.Errorf("lower: %s: %w", folder.Name(), err)
		}
		all[i] = stamp{st.Mode, st.Uid, st.Gid, st.Ino, st.Ctim}
	}
	return all, nil
}

// verify compares with the start what sandboxes see of the container. What they see of the skeleton has no writer.
func (b *base) verify() error {
	now, err := b.stamps()
	if err == nil && !slices.Equal(now, b.was) {
		err = errors.New("lower: files of the container, below the sandbox, were changed")
	}
	return err
}

// cloneFirst starts the process that makes the user namespace with it: it is the one that a kernel lets nobody enter
// without a right, and whose ids only its maker may map.
func (b *base) cloneFirst() (p *process, err error) {
	attributes := &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Credential: &syscall.Credential{}, Setsid: true}
	if b.order.OwnUsers {
		attributes.Cloneflags |= syscall.CLONE_NEWUSER
		users, err := readIDs("/proc/self/uid_map")
		if err != nil {
			return nil, err
		}
		groups, err := readIDs("/proc/self/gid_map")
		if err != nil {
			return nil, err
		}
		attributes.UidMappings, attributes.GidMappings = without(keeperID, users), without(keeperID, groups)
		attributes.GidMappingsEnableSetgroups = true
	}
	return b.start(nil, func(files [handed]uintptr) (int, error) {
		pid, err := syscall.ForkExec("/proc/self/exe", arguments(roleSkeleton), &syscall.ProcAttr{Dir: "/", Files: files[:], Sys: attributes})
		if err != nil {
			return 0, fmt.Errorf("new namespaces: %w", err)
		}
		return pid, nil
	})
}

// prepare starts the making of a ground, and does not wait: what it delivers, or its end, is in its socket.
func (b *base) prepare() (*process, error) {
	made := uintptr(syscall.CLONE_NEWNS | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS)
	if b.order.OwnNetwork {
		made |= syscall.CLONE_NEWNET
	}
	l, err := b.launch([]*os.File{b.mounts}, arguments(roleGround))
	if err != nil {
		return nil, err
	}
	l.made = made
	return b.start(nil, l.with)
}

// finish waits for a ground, and makes another one if its maker was killed. Nil is one that was never begun.
func (b *base) finish(p *process) (g *ground, err error) {
	if p != nil {
		if files, err := p.deliver(); err == nil {
			return newGround(files), nil
		}
	}
	if p, err = b.prepare(); err != nil {
		return nil, err
	}
	files, err := p.deliver()
	if err != nil {
		return nil, err
	}
	return newGround(files), nil
}

func newGround(files []*os.File) *ground { return &ground{upper: files[0], spaces: files[1:]} }

// begin starts the first process of a sandbox, which serves once it has its number.
func (b *base) begin(g *ground, configuration []byte, listener *os.File) (*process, error) {
	l, err := b.launch(g.spaces, arguments(""))
	if err != nil {
		return nil, err
	}
	l.process = b.order.OwnProcesses
	if listener == nil {
		listener = b.null
	}
	return b.start(configuration, func(files [handed]uintptr) (int, error) {
		files[ListenerFD] = listener.Fd()
		return l.with(files)
	})
}

func (b *base) launch(spaces []*os.File, argv []string) (*launch, error) {
	l := &launch{program: b.program.Fd(), outcome: b.outcome}
	if b.users != nil {
		l.spaces[0], l.count = b.users.Fd(), 1
	}
	for _, space := range spaces {
		l.spaces[l.count] = space.Fd()
		l.count++
	}
	var err error
	l.argv, err = syscall.SlicePtrFromStrings(argv)
	return l, err
}

func (l *launch) with(files [handed]uintptr) (int, error) {
	l.files = files
	return l.run()
}

func arguments(role string) []string {
	if role == "" {
		return []string{"sandboxd", "--" + Inner}
	}
	return []string{"sandboxd", "--" + Inner, role}
}

// start gives a process its order, which is the first line that it reads, and what follows.
func (b *base) start(lines []byte, spawn func([handed]uintptr) (int, error)) (*process, error) {
	order, err := json.Marshal(b.order)
	if err != nil {
		return nil, err
	}
	ours, theirs, err := socketPair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	read, write, err := os.Pipe()
	if err != nil {
		ours.Close()
		return nil, err
	}
	defer read.Close()
	p := &process{control: ours, stdin: write, outcome: b.outcome}
	if p.pid, err = spawn([handed]uintptr{read.Fd(), 1, 2, b.null.Fd(), theirs.Fd()}); err != nil {
		p.drop()
		return nil, err
	}
	_ = write.SetWriteDeadline(time.Now().Add(startWait))
	_, _ = write.Write(fmt.Appendf(nil, "%s\n%s\n", order, lines)) // one that has ended says why by its socket
	return p, nil
}

func (b *base) close() {
	for _, file := range append([]*os.File{b.program, b.null, b.users, b.mounts}, b.lower...) {
		if file != nil {
			file.Close()
		}
	}
	if b.outcome != nil {
		b.outcome.unmap()
	}
}

// bytes is what was written on a ground.
func (g *ground) bytes() int64 {
	var st syscall.Statfs_t
	if err := syscall.Fstatfs(int(g.upper.Fd()), &st); err != nil {
		return 1 << 62
	}
	return int64(st.Blocks-st.Bfree) * st.Bsize
}

// close lets go of a ground. If no process of its sandbox is left, all that was written on it is freed here.
func (g *ground) close() {
	if g == nil {
		return
	}
	for _, file := range append(g.spaces, g.upper) {
		file.Close()
	}
}
