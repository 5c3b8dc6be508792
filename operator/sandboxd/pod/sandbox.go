package pod

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"
	"time"
)

// Descriptors of a sandbox's first process, and its flag.
const (
	Inner      = "inner"
	ListenerFD = 3
	ControlFD  = 4

	// startWait bounds the making of a sandbox: about 15 ms, and a machine may be busy.
	startWait  = 20 * time.Second
	maxMessage = 4 << 10
	// filesAtOnce is less than a socket takes.
	filesAtOnce = 64
)

// message is what the two ends of a control socket tell each other: once that it is ready or why not, once that it is
// to serve, once that it is to be replaced.
type message struct {
	Problem     string `json:"problem,omitempty"`
	Incarnation int    `json:"incarnation,omitempty"`
	Replace     bool   `json:"replace,omitempty"` // with the connection to answer on
	More        bool   `json:"more,omitempty"`    // with files, of which others follow
}

// process is one that was started, as its keeper sees it.
type process struct {
	pid     int
	control *net.UnixConn
	stdin   *os.File // its end ends a sandbox
	outcome *outcome
}

// await reads a process's first message.
func (p *process) await() error {
	_, err := p.next()
	return err
}

func (p *process) next() (files []*os.File, err error) {
	more := true
	for more {
		told, with, failure := receive(p.control, startWait, filesAtOnce)
		files = append(files, with...)
		switch {
		case failure != nil:
			closeAll(files)
			if early := failed(p.outcome); early != nil {
				return nil, fmt.Errorf("sandbox: %w", early)
			}
			return nil, fmt.Errorf("sandbox: ended while it was made: %w", failure)
		case told.Problem != "":
			closeAll(files)
			return nil, errors.New(told.Problem)
		}
		more = told.More
	}
	return files, nil
}

// deliver returns what a process that was started for it has made. It has the last word about that process.
func (p *process) deliver() (files []*os.File, err error) {
	defer p.drop()
	if files, err = p.next(); err == nil && len(files) == 0 {
		err = errors.New("sandbox: nothing was made")
	}
	return files, err
}

// drop lets go of a process that has ended, or is to end.
func (p *process) drop() {
	p.control.Close()
	p.stdin.Close()
}

func closeAll(files []*os.File) {
	for _, file := range files {
		file.Close()
	}
}

func socketPair() (ours *net.UnixConn, theirs *os.File, err error) {
	ends, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	if ours, err = control(ends[0]); err != nil {
		syscall.Close(ends[1])
		return nil, nil, err
	}
	return ours, os.NewFile(uintptr(ends[1]), "control"), nil
}

func control(fd int) (*net.UnixConn, error) {
	file := os.NewFile(uintptr(fd), "control")
	defer file.Close()
	conn, err := net.FileConn(file)
	if err != nil {
		return nil, err
	}
	unix, is := conn.(*net.UnixConn)
	if !is {
		conn.Close()
		return nil, errors.New("control: is no unix socket")
	}
	return unix, nil
}

// send passes descriptors on too.
func send(over *net.UnixConn, told message, with ...int) error {
	content, err := json.Marshal(told)
	if err != nil {
		return err
	}
	var rights []byte
	if len(with) > 0 {
		rights = syscall.UnixRights(with...)
	}
	_ = over.SetWriteDeadline(time.Now().Add(startWait))
	_, _, err = over.WriteMsgUnix(content, rights, nil)
	return err
}

// sendFiles passes any number on.
func sendFiles(over *net.UnixConn, files []int) error {
	for {
		part := files[:min(len(files), filesAtOnce)]
		files = files[len(part):]
		if err := send(over, message{More: len(files) > 0}, part...); err != nil || len(files) == 0 {
			return err
		}
	}
}

// receive waits for ever if the limit is 0. It bounds what it reads, and takes the first of the descriptors: the other
// end may be a tenant's by now.
func receive(over *net.UnixConn, limit time.Duration, room int) (told message, with []*os.File, err error) {
	deadline := time.Time{}
	if limit > 0 {
		deadline = time.Now().Add(limit)
	}
	_ = over.SetReadDeadline(deadline)
	content, rights := make([]byte, maxMessage), make([]byte, syscall.CmsgSpace(4*room))
	n, had, _, _, err := over.ReadMsgUnix(content, rights)
	if err != nil {
		return told, nil, err
	}
	if sent, err := syscall.ParseSocketControlMessage(rights[:had]); err == nil && len(sent) > 0 {
		if fds, err := syscall.ParseUnixRights(&sent[0]); err == nil {
			for _, fd := range fds {
				with = append(with, os.NewFile(uintptr(fd), "received"))
			}
		}
	}
	if n == 0 {
		return told, with, errors.New("the other end has gone")
	}
	return told, with, json.Unmarshal(content[:n], &told)
}

// Link is the sandbox's end of the control socket.
type Link struct {
	conn *net.UnixConn
}

// Enter is called in a process that a keeper starts. In a sandbox's first one it gives up what commands are not to
// have, and returns a link. In another one it makes what the role says, and link is nil. What it returns an error for
// is told to the keeper too.
func Enter(role string, stdin *bufio.Reader) (o Order, link *Link, err error) {
	syscall.CloseOnExec(ControlFD)
	conn, err := control(ControlFD)
	if err != nil {
		return o, nil, err
	}
	link = &Link{conn: conn}
	defer func() {
		if err != nil {
			_ = link.Fail(err)
		}
	}()
	line, err := stdin.ReadSlice('\n')
	if err != nil {
		return o, link, fmt.Errorf("order: %w", err)
	}
	if err := json.Unmarshal(line, &o); err != nil {
		return o, link, fmt.Errorf("order: %w", err)
	}
	switch role {
	case roleSkeleton:
		return o, nil, giveSkeleton(o, conn)
	case roleGround:
		return o, nil, giveGround(o, conn)
	}
	if o.OwnProcesses { // a new /proc can only be mounted while another one is there to be seen
		root := o.Stage + rootFolder
		if err := makeProc(root + "/proc"); err != nil {
			return o, link, err
		}
		if err := enterRoot(root); err != nil {
			return o, link, err
		}
	}
	return o, link, seal()
}

func giveSkeleton(o Order, to *net.UnixConn) error {
	lower, err := makeSkeleton(o)
	if err != nil {
		return err
	}
	var files []int
	if o.OwnUsers {
		closeProjects()
		files, err = openAll(files, syscall.O_RDONLY, "/proc/self/ns/user")
	}
	if err == nil {
		files, err = openAll(files, syscall.O_RDONLY, "/proc/self/ns/mnt")
	}
	if err == nil {
		files, err = openAll(files, openPath|syscall.O_NOFOLLOW, lower...)
	}
	if err != nil {
		return err
	}
	return sendFiles(to, files)
}

func giveGround(o Order, to *net.UnixConn) error {
	if err := prctl(prSetDumpable, 0); err != nil { // a sandbox may see this process
		return err
	}
	root, err := layRoot(o)
	if err != nil {
		return err
	}
	if o.OwnNetwork {
		if err := raiseLoopback(); err != nil {
			return err
		}
	}
	files, err := openAll(nil, openPath, o.Stage+upperFolder)
	if err != nil {
		return err
	}
	spaces := []string{"/proc/self/ns/mnt", "/proc/self/ns/ipc", "/proc/self/ns/uts"}
	if o.OwnNetwork {
		spaces = append(spaces, "/proc/self/ns/net")
	}
	if files, err = openAll(files, syscall.O_RDONLY, spaces...); err != nil {
		return err
	}
	if !o.OwnProcesses {
		if err := enterRoot(root); err != nil {
			return err
		}
	}
	return sendFiles(to, files)
}

func openAll(files []int, flags int, paths ...string) ([]int, error) {
	for _, path := range paths {
		fd, err := syscall.Open(path, flags|syscall.O_CLOEXEC, 0)
		if err != nil {
			return files, &os.PathError{Op: "open", Path: path, Err: err}
		}
		files = append(files, fd)
	}
	return files, nil
}

// Fail tells the keeper why there will be no sandbox.
func (l *Link) Fail(why error) error {
	return send(l.conn, message{Problem: why.Error()[:min(len(why.Error()), maxMessage/8)]})
}

// Ready tells the keeper that this sandbox can serve, and waits for the number that it is to serve under.
func (l *Link) Ready() (incarnation int, err error) {
	if err := send(l.conn, message{}); err != nil {
		return 0, err
	}
	told, _, err := receive(l.conn, 0, 1)
	return told.Incarnation, err
}

// Replace asks the keeper to end this sandbox, and to answer on the connection when the next one serves.
func (l *Link) Replace(connection uintptr) error {
	return send(l.conn, message{Replace: true}, int(connection))
}

// probe makes a sandbox and ends it at once.
func probe(o Order) error {
	b, err := newBase(o)
	if err != nil {
		return err
	}
	defer b.close()
	g, err := b.finish(nil)
	if err != nil {
		return err
	}
	defer g.close()
	p, err := b.begin(g, nil, nil)
	if err != nil {
		return err
	}
	err = p.await()
	p.drop()
	_ = syscall.Kill(p.pid, syscall.SIGKILL)
	for {
		if _, interrupted := syscall.Wait4(p.pid, nil, 0, nil); !errors.Is(interrupted, syscall.EINTR) {
			return err
		}
	}
}

// StageOf returns the mount point that a program is on, which is where sandboxes are made.
func StageOf(program string) (string, error) {
	places, err := mountPoints()
	if err != nil {
		return "", err
	}
	stage := ""
	for _, place := range places {
		if strings.HasPrefix(program, place+"/") && len(place) > len(stage) {
			stage = place
		}
	}
	if stage == "" {
		return "", fmt.Errorf("%s: lies on the container's root: it must be on a volume of its own, where `sandboxd install` puts it", program)
	}
	return stage, nil
}
