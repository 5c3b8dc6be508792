package main

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"
)

const (
	procMagic      = 0x9fa0 // statfs type of procfs
	sysOpenat2     = 437    // on every architecture
	atFdcwd        = -100
	noMagicLinks   = 0x02 // RESOLVE_NO_MAGICLINKS
	openatAttempts = 8    // the kernel asks for another one after a race with a rename
)

// openHow is the kernel's struct open_how.
type openHow struct{ flags, mode, resolve uint64 }

// openPlain opens a path, but follows none of the links of /proc that lead past the file system: below
// /proc/self/fd are the daemon's own descriptors, some of them files of the machine outside.
func openPlain(path string, flags int, mode os.FileMode) (*os.File, error) {
	name, err := syscall.BytePtrFromString(path)
	if err != nil {
		return nil, badRequest("path: has a NUL byte")
	}
	how := openHow{flags: uint64(flags | syscall.O_CLOEXEC), resolve: noMagicLinks}
	if flags&os.O_CREATE != 0 {
		how.mode = uint64(mode.Perm())
	}
	directory := atFdcwd
	for attempt := 0; ; attempt++ {
		fd, _, errno := syscall.Syscall6(sysOpenat2, uintptr(directory), uintptr(unsafe.Pointer(name)),
			uintptr(unsafe.Pointer(&how)), unsafe.Sizeof(how), 0, 0)
		switch {
		case errno == 0:
			return os.NewFile(fd, path), nil
		case (errno != syscall.EINTR && errno != syscall.EAGAIN) || attempt == openatAttempts:
			return nil, &os.PathError{Op: "open", Path: path, Err: errno}
		}
	}
}

// openRegular opens what a path leads to, if that is an ordinary file. A tenant may have put a
// pipe there, which would block us, or a link into /proc, where the daemon sees its own secrets.
func openRegular(path string, flags int, mode os.FileMode) (*os.File, os.FileInfo, error) {
	file, err := openPlain(path, flags|syscall.O_NONBLOCK|syscall.O_NOCTTY, mode)
	if err != nil {
		return nil, nil, err
	}
	info, err := file.Stat()
	var system syscall.Statfs_t
	if err == nil {
		err = syscall.Fstatfs(int(file.Fd()), &system)
	}
	if err == nil && (!info.Mode().IsRegular() || system.Type == procMagic) {
		err = notOrdinary(path)
	}
	if err != nil {
		file.Close()
		return nil, nil, err
	}
	return file, info, nil
}

func (s *server) fileLimit() int64 {
	if s.cfg.FileLimitBytes > 0 {
		return s.cfg.FileLimitBytes
	}
	return maxFileBytes
}

func notOrdinary(path string) error { return badRequest("path: " + path + " is not an ordinary file") }

func filePath(r *http.Request) (string, error) {
	path := r.URL.Query().Get("path")
	if !filepath.IsAbs(path) {
		return "", badRequest("path: " + strconv.Quote(path) + " is not absolute")
	}
	if strings.ContainsRune(path, 0) || len(path) >= maxPath {
		return "", badRequest("path: has a NUL byte, or more than " + strconv.Itoa(maxPath) + " bytes")
	}
	return filepath.Clean(path), nil
}

// getFile answers with an open file, which a stalled reader would keep, and its memory with it, from
// the next lease: so a reset waits for it, and the end of the lease ends it.
func (s *server) getFile(w http.ResponseWriter, r *http.Request) (_ reply, err error) {
	path, err := filePath(r)
	if err != nil {
		return reply{}, err
	}
	s.transfers.RLock()
	defer func() {
		if err != nil {
			s.transfers.RUnlock()
		}
	}()
	held, err := s.holder(bearer(r)) // again: a reset may have passed while we waited for the lock
	if err != nil {
		return reply{}, err
	}
	file, info, err := openRegular(path, os.O_RDONLY, 0)
	if err != nil {
		return reply{}, err
	}
	if limit := s.fileLimit(); info.Size() > limit {
		file.Close()
		return reply{}, apiError{http.StatusRequestEntityTooLarge, "TooLarge",
			fmt.Sprintf("path: %s has %d bytes, more than %d", path, info.Size(), limit)}
	}
	stop := context.AfterFunc(held.ctx, func() { _ = http.NewResponseController(w).SetWriteDeadline(time.Unix(1, 0)) })
	return reply{file: file, size: info.Size(), done: func() {
		stop()
		file.Close()
		s.transfers.RUnlock()
	}}, nil
}
