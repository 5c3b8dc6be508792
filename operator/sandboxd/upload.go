package main

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"hash"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"agentfly.dev/sandboxd/lease"
)

const (
	maxLinks = 40 // of the kernel, in one path
	maxPath  = 4096
	oPath    = 0x200000 // O_PATH, on every architecture
)

// putFile receives a file. It has its name once it is whole, and not before.
func (s *server) putFile(w http.ResponseWriter, r *http.Request) (reply, error) {
	path, err := filePath(r)
	if err != nil {
		return reply{}, err
	}
	mode, err := fileMode(r)
	if err != nil {
		return reply{}, err
	}
	key, err := idempotencyKey(r)
	if err != nil {
		return reply{}, err
	}
	if limit := s.fileLimit(); r.ContentLength > limit {
		return reply{}, &http.MaxBytesError{Limit: limit}
	}
	s.transfers.RLock()
	defer s.transfers.RUnlock()
	held, err := s.holder(bearer(r)) // again: a reset may have passed while we waited for the lock
	if err != nil {
		return reply{}, err
	}
	// A lease that ends stops the upload: the reset behind it is waiting.
	defer context.AfterFunc(held.ctx, func() { _ = http.NewResponseController(w).SetReadDeadline(time.Unix(1, 0)) })()
	body := http.MaxBytesReader(w, r.Body, s.fileLimit())
	written, err := held.putOnce(r, key, body, func(body io.Reader) (int64, error) { return writeFile(path, mode, body) })
	if held.ctx.Err() != nil {
		return reply{}, lease.ErrLost
	}
	return reply{value: map[string]any{"bytes": written}}, err
}

// putOnce writes unless the same was written under this key.
func (t *tenancy) putOnce(r *http.Request, key string, body io.Reader, write func(io.Reader) (int64, error)) (int64, error) {
	if key == "" {
		return write(body)
	}
	content := sha256.New()
	body = io.TeeReader(body, content)
	request := sha256.Sum256([]byte(r.Method + r.URL.RequestURI()))
	for {
		one := &upload{ended: make(chan struct{})}
		known, err := t.jobs.claim(key, request, one, true)
		if err != nil {
			return 0, err
		}
		if known == nil {
			defer close(one.ended)
			if one.written, err = write(body); err != nil {
				one.failed = true
				t.jobs.release(key)
				return one.written, err
			}
			content.Sum(one.content[:0])
			return one.written, nil
		}
		before, isUpload := known.(*upload)
		if !isUpload {
			return 0, keyReused(key)
		}
		select {
		case <-before.ended:
		case <-t.ctx.Done():
			return 0, lease.ErrLost
		}
		if !before.failed {
			return before.written, sameContent(key, before.content, body, content)
		}
	}
}

// sameContent reads a body to its end, for its hash alone.
func sameContent(key string, want digest, body io.Reader, content hash.Hash) error {
	if _, err := io.Copy(io.Discard, body); err != nil {
		return err
	}
	if want != digest(content.Sum(nil)) {
		return keyReused(key)
	}
	return nil
}

func fileMode(r *http.Request) (os.FileMode, error) {
	given := r.URL.Query().Get("mode")
	if given == "" {
		return defaultFileMode, nil
	}
	mode, err := strconv.ParseUint(given, 8, 32)
	if err != nil || mode > 0o777 {
		return 0, badRequest("mode: " + strconv.Quote(given) + " is not octal, at most 0777")
	}
	return os.FileMode(mode), nil
}

// writeFile puts a file under a temporary name beside its own, and renames it when it is whole. The new file
// keeps the owner of the one that it replaces.
func writeFile(path string, mode os.FileMode, body io.Reader) (written int64, err error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return 0, err
	}
	folder, name, old, err := behindLinks(path)
	if err != nil {
		return 0, err
	}
	defer folder.Close()
	at := int(folder.Fd())
	temporary := ".sandboxd-" + rand.Text()
	fd, err := syscall.Openat(at, temporary, syscall.O_WRONLY|syscall.O_CREAT|syscall.O_EXCL|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, uint32(mode))
	if err != nil {
		return 0, &os.PathError{Op: "create", Path: path, Err: err}
	}
	file := os.NewFile(uintptr(fd), path)
	defer func() {
		file.Close()
		if err != nil {
			_ = syscall.Unlinkat(at, temporary)
		}
	}()
	if old != nil {
		if err := file.Chown(int(old.Uid), int(old.Gid)); err != nil {
			return 0, err
		}
	}
	if err := file.Chmod(mode); err != nil {
		return 0, err
	}
	if written, err = io.Copy(file, body); err != nil {
		return written, err
	}
	if err := syscall.Renameat(at, temporary, at, name); err != nil {
		return written, &os.PathError{Op: "rename", Path: path, Err: err}
	}
	return written, nil
}

// behindLinks follows the links of a last path component, so that the file behind them is replaced and not a
// link. It returns the folder, the name in it, and what has that name now, if anything.
func behindLinks(path string) (folder *os.File, name string, old *syscall.Stat_t, err error) {
	for range maxLinks {
		if len(path) > maxPath {
			return nil, "", nil, &os.PathError{Op: "open", Path: path, Err: syscall.ENAMETOOLONG}
		}
		slash := strings.LastIndexByte(path, '/')
		place := path[:slash+1] // not cleaned: only the kernel knows what ".." behind a link means
		name = path[slash+1:]
		if folder, err = openPlain(place, oPath|syscall.O_DIRECTORY, 0); err != nil {
			return nil, "", nil, err
		}
		target, old, err := look(folder, name, path)
		if err == nil && target == "" {
			return folder, name, old, nil
		}
		folder.Close()
		if err != nil {
			return nil, "", nil, err
		}
		if path = target; target[0] != '/' {
			path = place + target
		}
	}
	return nil, "", nil, &os.PathError{Op: "open", Path: path, Err: syscall.ELOOP}
}

// look says what a name in a folder is: a link to a target, an ordinary file, or nothing yet.
func look(folder *os.File, name, path string) (target string, old *syscall.Stat_t, err error) {
	if name == "" || name == "." || name == ".." {
		return "", nil, &os.PathError{Op: "open", Path: path, Err: syscall.EISDIR}
	}
	var system syscall.Statfs_t
	if err := syscall.Fstatfs(int(folder.Fd()), &system); err != nil {
		return "", nil, err
	}
	if system.Type == procMagic {
		return "", nil, notOrdinary(path)
	}
	fd, err := syscall.Openat(int(folder.Fd()), name, oPath|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, 0)
	if errors.Is(err, syscall.ENOENT) {
		return "", nil, nil
	}
	if err != nil {
		return "", nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer syscall.Close(fd)
	old = &syscall.Stat_t{}
	if err := syscall.Fstat(fd, old); err != nil {
		return "", nil, err
	}
	switch old.Mode & syscall.S_IFMT {
	case syscall.S_IFREG:
		return "", old, nil
	case syscall.S_IFDIR:
		return "", nil, &os.PathError{Op: "open", Path: path, Err: syscall.EISDIR}
	case syscall.S_IFLNK:
		target, err = readLink(fd)
		return target, nil, err
	}
	return "", nil, notOrdinary(path)
}

// readLink reads the link that a descriptor is of.
func readLink(fd int) (string, error) {
	var empty byte
	buffer := make([]byte, maxPath)
	n, _, errno := syscall.Syscall6(syscall.SYS_READLINKAT, uintptr(fd), uintptr(unsafe.Pointer(&empty)),
		uintptr(unsafe.Pointer(&buffer[0])), maxPath, 0, 0)
	if errno != 0 {
		return "", errno
	}
	if n == 0 {
		return "", syscall.ENOENT
	}
	return string(buffer[:n]), nil
}
